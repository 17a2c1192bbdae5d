"""What the site shows, and in which order: the public names by task, and the pages."""

# A page's file: what the menu calls it. Pages of a folder's README follow it in the menu.
PAGES = {
    "examples/README.md": "Guides and examples",
    "numbsparse/kernels/README.md": "Course",
    "BENCHMARKS.md": "Benchmarks",
    "CONTRIBUTING.md": "Contributing",
    "CHANGELOG.md": "Changes",
    ".github/SUPPORT.md": "Support",
    ".github/SECURITY.md": "Security",
}
GUIDES = [
    "examples/guides/first_quarter_of_an_hour.md",
    "examples/guides/first_model.md",
    "examples/guides/products.md",
    "examples/guides/from_torch.md",
    "examples/guides/from_jax.md",
    "examples/guides/pruning.md",
    "examples/guides/checkpoints.md",
    "examples/guides/precision.md",
    "examples/guides/many_cards.md",
    "examples/guides/convolutions.md",
    "examples/guides/own_kernel.md",
]
PROGRAMS = [
    "examples/block_sparse_matmul.py",
    "examples/char_lm.py",
    "examples/equal_parameters.py",
    "examples/scaling.py",
    "examples/sentiment.py",
    "examples/mixture_of_experts.py",
    "examples/mixture_times.py",
    "examples/pixelcnn.py",
    "examples/pixel_scaling.py",
    "examples/prune.py",
    "examples/grow.py",
    "examples/torch_gpt.py",
    "examples/many_cards.py",
]
COURSE = [
    "examples/01_layout.py",
    "examples/02_three_products.py",
    "examples/03_first_kernel.py",
    "examples/04_shared_tile.py",
    "examples/05_race.py",
    "examples/06_tensor_core.py",
    "examples/07_your_own_rung.py",
    "examples/08_dense_to_sparse.py",
]
LESSONS = "numbsparse/kernels/README.md"  # a page for each of its headings, in its order
LADDER = "numbsparse/kernels/ladder/"  # a step's lesson ends with its file, and what is new in it

EXPLAINED = ("numbsparse.compat.blocksparse",)  # modules whose docstring the task's page shows

# (task, what the page says first, names in that module)
REFERENCE = [
    (
        "Matrices and layouts",
        "A pattern says which blocks are kept, a layout indexes it, a matrix holds the values.",
        {"numbsparse": "Layout BlockSparse draw"},
    ),
    (
        "Patterns",
        "Which blocks of a weight are kept: boolean arrays (in_blocks, out_blocks).",
        {
            "numbsparse.patterns": "dense random balanced_random block_diagonal banded "
            "watts_strogatz watts_strogatz_2d barabasi_albert barabasi_albert_rectangular "
            "from_dense taps causal from_bck as_pattern mean_path_length mixing_steps"
        },
    ),
    (
        "Products and convolutions",
        "Each has the others as its gradients. They take arrays, and Tensors to differentiate.",
        {
            "numbsparse": "matmul sddmm conv conv_transpose conv_weight_grad set_precision tune",
        },
    ),
    (
        "In torch",
        "Operators and modules for torch's models; they take and give torch's tensors.",
        {
            "numbsparse.torch": "sparsify_ adopt_layouts_ Linear Conv1d Conv2d Conv3d LSTM "
            "BlockSparse matmul sddmm to_nn_state_dict from_nn_state_dict"
        },
    ),
    (
        "From openai/blocksparse",
        "Its two classes, on these kernels, and what became of the rest.",
        {"numbsparse.compat.blocksparse": "BlocksparseMatMul BlocksparseConv"},
    ),
    (
        "In JAX",
        "A pytree and primitives, under jit, grad and vmap; they take and give JAX's arrays.",
        {"numbsparse.jax": "BlockSparse matmul sddmm"},
    ),
    (
        "Arrays on a GPU",
        "A GPU's arrays, its streams, and steps that are captured once and replayed.",
        {
            "numbsparse": "to_device DeviceArray stream synchronize graph compile_ahead",
            "numbsparse.device": "device",
        },
    ),
    (
        "Differentiation",
        "A tape of operations, and gradients through it, of any order.",
        {"numbsparse": "Tensor grad no_grad", "numbsparse.nn": "recompute"},
    ),
    (
        "Layers",
        "Names and arguments are torch's; `layout` and `block_size` make a layer sparse.",
        {
            "numbsparse.nn": "Module Parameter Sequential ModuleList ModuleDict "
            "Linear Conv1d Conv2d Conv3d "
            "ConvTranspose1d ConvTranspose2d ConvTranspose3d LSTM MultiplicativeLSTM "
            "NormalizedProduct Embedding LayerNorm BatchNorm Dropout ReLU GELU Sigmoid Tanh",
            "numbsparse.nn.utils": "weight_norm",
        },
    ),
    (
        "Initialisers",
        "First values of block-sparse weights; a unit's fan-in counts only kept blocks.",
        {"numbsparse.nn.init": "uniform normal orthogonal identity fan_in"},
    ),
    (
        "Functions",
        "Differentiable functions of Tensors and arrays.",
        {
            "numbsparse.nn.functional": "linear embedding layer_norm dropout relu gelu elu "
            "concat_elu glu sigmoid tanh softplus log_sigmoid softmax log_softmax logsumexp "
            "cross_entropy mse_loss lstm lstm_step_by_step repeated_product repeated_norm "
            "repeated_cell column_norms normalise_columns scale_columns scale_blocks add "
            "subtract multiply divide negative power sqrt exp expm1 log cast sum mean reshape "
            "transpose broadcast_to concatenate stack split unbind getitem remap "
            "abs block_norms",
        },
    ),
    (
        "Training",
        "Optimizers, schedules, clipping, pruning, mixed precision, averages of weights.",
        {
            "numbsparse.nn.optim": "Optimizer SGD Adam AdamW LambdaLR cosine warmup warmup_cosine "
            "LossScaler ExponentialMovingAverage",
            "numbsparse.nn.utils": "clip_grad_norm prune compact GradualPruning HardConcrete "
            "GroupLasso PruneAndGrow Rewiring absent_norms",
        },
    ),
    (
        "Many cards",
        "Processes that train together: what they sum, and what each keeps a part of.",
        {
            "numbsparse.distributed": "init Group DataParallel ShardedOptimizer ColumnLinear "
            "RowLinear SplitLSTM save RankLost"
        },
    ),
    (
        "Files",
        "State dicts in NumPy's format or safetensors, written whole or not at all.",
        {"numbsparse": "save load"},
    ),
    (
        "Kernels of your own",
        "Check gradients and kernels, find races, count what a kernel requests of memory.",
        {
            "numbsparse.kernels.matmul": "add_rung",
            "numbsparse.testing": "check_rung check_grads count Count races Race trace Trace "
            "record in_turns Case",
        },
    ),
]
