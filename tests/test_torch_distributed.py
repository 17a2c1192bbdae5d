"""Two processes that share the work: DDP, and FSDP2, which deals the blocks out; gloo, or NCCL.

The first is that of the tests, which has loaded torch.
"""

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from datetime import timedelta
from importlib import import_module
from io import StringIO

import pytest
from examples_helpers import EXAMPLES, write_text
from torch_helpers import layout, nst, torch

from numbsparse import device
from numbsparse.distributed import environment, start

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch was built without torch.distributed"
)
STEPS, ROWS = 3, 4


def model():
    torch.manual_seed(0)
    first = nst.Linear(16, 32, layout=layout(4, 8), block_size=4)
    return torch.nn.Sequential(first, torch.nn.Tanh(), torch.nn.Linear(32, 4))


def batches():
    torch.manual_seed(1)
    return torch.randn(STEPS, 2 * ROWS, 16)


def train(net, batches):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    for x in batches:
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def shared(net, kind, place):
    """The net that both ranks train, and how its whole state is gathered."""
    if kind == "DDP":
        return torch.nn.parallel.DistributedDataParallel(net), net.state_dict
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.device_mesh.init_device_mesh(place, (2,))
    fully_shard(net[0], mesh=mesh)
    fully_shard(net, mesh=mesh)
    how = StateDictOptions(full_state_dict=True)
    return net, lambda: get_model_state_dict(net, options=how)


def from_rank_0(net, state):
    """Load what rank 0 alone has."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    how = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(net, state, options=how)


def example(text, place="cpu"):
    """The bits per character of a few steps of torch_gpt's sparse model, by all ranks there are."""
    torch_gpt = import_module("torch_gpt")
    given = "--width 128 --layers 1 --batch 4 --length 8 --steps 2 --held-out-batches 1"
    options = torch_gpt.parse([*given.split(), "--device", place])
    with redirect_stderr(StringIO()):
        return torch_gpt.train("sparse", torch_gpt.open_text(text), options)["bits"]


def worker(rank, backend, port, text):
    """Train with the other rank in both ways, and see that both know what one alone learns."""
    place, wait = "cuda" if backend == "nccl" else "cpu", timedelta(seconds=90)
    if place == "cuda":
        torch.cuda.set_device(rank)
    alone, of_all = model().to(place), batches().to(place)
    train(alone, of_all)
    store = torch.distributed.TCPStore("localhost", port, 2, is_master=rank == 0, timeout=wait)
    how = {"store": store, "rank": rank, "world_size": 2, "timeout": wait}
    torch.distributed.init_process_group(backend, **how)
    try:
        for kind in ("DDP", "FSDP2"):
            net, state = shared(model().to(place), kind, place)
            train(net, of_all[:, rank * ROWS :][:, :ROWS])
            torch.testing.assert_close(dict(state()), dict(alone.state_dict()), msg=kind)
        net, state = shared(model().to(place), "FSDP2", place)
        from_rank_0(net, alone.state_dict() if rank == 0 else {})
        torch.testing.assert_close(dict(state()), dict(alone.state_dict()), msg="from rank 0")
        return example(text, place)
    finally:
        torch.distributed.destroy_process_group()


two_gpus = pytest.mark.skipif(
    device.SIMULATED or torch.cuda.device_count() < 2, reason="takes two GPUs"
)


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=two_gpus)])
def test_two_processes_train_as_one(backend, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    text = write_text(tmp_path)
    bits = example(text)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    start = torch.multiprocessing.get_context("spawn").Process
    other = start(target=worker, args=(1, backend, port, text))
    other.start()
    try:
        assert worker(0, backend, port, text) == pytest.approx(bits, rel=1e-3)
        other.join(timeout=60)
        assert other.exitcode == 0
    finally:
        other.kill()


@pytest.mark.filterwarnings("ignore:DTensor random operators")  # on the CPU
@pytest.mark.parametrize(
    ("make", "fan_in"),
    [
        (lambda: nst.Linear(8, 12, block_size=4), 8),
        (lambda: nst.Conv1d(8, 12, 3, block_size=4), 24),
        (lambda: nst.LSTM(8, 8, block_size=4), 8),
    ],
    ids=["Linear", "Conv1d", "LSTM"],
)
def test_what_is_made_on_meta_and_sharded_is_drawn(make, fan_in):
    of_one = {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}
    torch.distributed.init_process_group("gloo", **of_one)
    try:
        from torch.distributed.fsdp import fully_shard

        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        with torch.device("meta"):
            layer = make()
        fully_shard(layer, mesh=mesh).to_empty(device="cpu")
        for parameter in layer.parameters():
            torch.nn.init.zeros_(parameter)
        torch.manual_seed(0)
        layer.reset_parameters()
        drawn = {name: of.full_tensor().detach() for name, of in layer.named_parameters()}
    finally:
        torch.distributed.destroy_process_group()
    if "bias_l0" in drawn:
        assert torch.equal(drawn.pop("bias_l0"), make().bias_l0)
    for values in drawn.values():
        assert 0.5 < values.abs().amax() * fan_in**0.5 < 1


def test_under_torchrun_its_store_says_where_rank_0_listens(monkeypatch):
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_RUN_ID": "a test"}
    for name, value in names.items():
        monkeypatch.setenv(name, str(value))

    def met(rank):
        links = start._meet(environment.Process("torchrun", rank, 2, rank), {}, None, 20.0)
        try:
            return links.share(rank)
        finally:
            links.close("")

    with ThreadPoolExecutor() as threads:
        assert list(threads.map(met, range(2))) == [[0, 1]] * 2
