import json
import os

import torch

from sizewise.engines.shared_tensors import SharedTensors

TENSORS = {
    "w": torch.randn(3, 5),
    "n": torch.tensor(7),
    "none": torch.zeros(2, 0),
    "bytes": torch.arange(3, dtype=torch.uint8),
    "flags": torch.tensor([True, False]),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "turned": torch.randn(2, 3).t(),
}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return list(left) == list(right) and all(
        torch.equal(left[name], right[name]) and left[name].dtype == right[name].dtype
        for name in left
    )


def test_tensors_come_back_through_a_layout_in_json() -> None:
    arena = SharedTensors()
    layout = json.loads(json.dumps(arena.write(TENSORS)))
    assert same(arena.read(layout), TENSORS)
    arena.close()


def test_tensors_start_at_multiples_of_64() -> None:
    arena = SharedTensors()
    layout = arena.write(TENSORS)
    offsets = [offset for _, _, offset in layout.values()]
    assert all(offset % 64 == 0 for offset in offsets)
    assert offsets[:2] == [0, 64]
    arena.close()


def test_second_opening_of_a_descriptor_sees_the_same_memory() -> None:
    ours = SharedTensors()
    theirs = SharedTensors(os.dup(ours.descriptor))
    layout = ours.write({"w": torch.zeros(3)})
    seen = theirs.read(layout)["w"]
    ours.write({"w": torch.ones(3)})
    assert seen.tolist() == [1, 1, 1]
    seen[0] = 5
    assert ours.read(layout)["w"].tolist() == [5, 1, 1]
    theirs.close()
    ours.close()


def test_another_process_reads_what_this_one_wrote() -> None:
    arena = SharedTensors()
    layout = arena.write({"w": torch.arange(3.0)})
    child = os.fork()
    if child == 0:
        seen = SharedTensors(arena.descriptor).read(layout)["w"].tolist() == [0, 1, 2]
        arena.write({"w": torch.full((3,), 9.0)})
        os._exit(0 if seen else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert arena.read(layout)["w"].tolist() == [9, 9, 9]
    arena.close()


def test_arena_grows_and_old_tensors_stay_valid() -> None:
    ours = SharedTensors()
    theirs = SharedTensors(os.dup(ours.descriptor))
    small = ours.write({"w": torch.ones(4)})
    before = theirs.read(small)["w"]
    large = ours.write({"w": torch.full((4,), 2.0), "v": torch.full((100_000,), 3.0)})
    assert theirs.read(large)["v"].unique().tolist() == [3]
    assert before.tolist() == [2, 2, 2, 2]  # a shared map: the newest writing
    shrunk = ours.write({"v": torch.zeros(2)})
    assert theirs.read(shrunk)["v"].tolist() == [0, 0]
    theirs.close()
    ours.close()


def test_empty_arena_holds_nothing() -> None:
    arena = SharedTensors()
    assert arena.read(arena.write({})) == {}
    assert arena.read(arena.write({"none": torch.zeros(0)}))["none"].shape == (0,)
    arena.close()


def test_arena_has_no_name_and_closes() -> None:
    arena = SharedTensors()
    assert os.fstat(arena.descriptor).st_nlink == 0
    arena.close()
    try:
        os.fstat(arena.descriptor)
    except OSError:
        return
    raise AssertionError("the descriptor is still open")
