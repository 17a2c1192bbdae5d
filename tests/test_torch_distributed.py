"""Two processes that share the work over gloo: DDP, and FSDP2, which deals the blocks out."""

import pytest
from torch_helpers import layout, nst, torch

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


def worker(rank, port, kind, results):
    store = torch.distributed.TCPStore("localhost", port, 2, is_master=False)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    net, mine = model(), batches()[:, rank * ROWS :][:, :ROWS]
    if kind == "DDP":
        train(torch.nn.parallel.DistributedDataParallel(net), mine)
        state = net.state_dict()
    else:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
        from torch.distributed.fsdp import fully_shard

        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
        fully_shard(net[0], mesh=mesh)
        fully_shard(net, mesh=mesh)
        train(net, mine)
        state = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))
    results.put((rank, {key: value.tolist() for key, value in state.items()}))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_two_processes_train_as_one(kind):
    alone = model()
    train(alone, batches())
    context = torch.multiprocessing.get_context("spawn")
    store = torch.distributed.TCPStore("localhost", 0, 3, is_master=True, wait_for_workers=False)
    results = context.Queue()
    workers = [
        context.Process(target=worker, args=(rank, store.port, kind, results)) for rank in range(2)
    ]
    try:
        for process in workers:
            process.start()
        states = dict(results.get(timeout=30) for _ in workers)
        for process in workers:
            process.join(timeout=20)
    finally:
        for process in workers:
            process.kill()
    whole = [states[0], states[1]] if kind == "DDP" else [states[0]]
    for state in whole:
        assert state.keys() == alone.state_dict().keys()
        for key, value in alone.state_dict().items():
            got = torch.tensor(state[key], dtype=value.dtype)
            torch.testing.assert_close(got, value, msg=key)
