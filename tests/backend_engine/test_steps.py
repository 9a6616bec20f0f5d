"""What surrounds a step's layers on a GPU, against the same in torch."""

import importlib
import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":  # read when the kernels are first imported
    os.environ["TRITON_INTERPRET"] = "1"

kernels = importlib.import_module("promptsluice.backend_engine.steps_triton")


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 40), (9, 1500)])
def test_single_rows(rows: int, width: int) -> None:
    """Pages of tables that are longer than one program copies, for lines of a larger table."""
    pages = torch.randint(0, 1 << 20, (rows + 2, width), dtype=torch.int32, device=DEVICE)
    places = torch.randint(0, width * 16, (rows,), device=DEVICE)
    owners = torch.randperm(rows + 2, device=DEVICE)[:rows]
    made = kernels.single_rows(places, owners, pages, page_size=16)
    assert torch.equal(made.slots, pages[owners, places // 16].long() * 16 + places % 16)
    assert torch.equal(made.visible, (places + 1).int())
    assert torch.equal(made.page_table, pages[owners])
    assert torch.equal(made.query_start, torch.arange(rows + 1, dtype=torch.int32, device=DEVICE))
    assert torch.equal(made.numbers, torch.arange(rows, device=DEVICE))


@pytest.mark.parametrize("rows", [1, 5])
def test_moved_on(rows: int) -> None:
    """Ids go to the two lines in turns; an undecided row runs on some id, a spare one stays where it is."""
    ids, places = torch.zeros(rows, dtype=torch.int64, device=DEVICE), torch.arange(rows, device=DEVICE) * 10
    owners = torch.arange(rows, device=DEVICE)
    owners[-1] = 7
    read = torch.zeros(2, 6, dtype=torch.int64, pin_memory=DEVICE == "cuda")
    turn, spare = torch.zeros(1, dtype=torch.int64, device=DEVICE), 7
    moved = torch.arange(rows, device=DEVICE) * 10
    for step in range(3):
        fresh = torch.arange(rows, device=DEVICE) + 100 * step - 1
        kernels.moved_on(fresh, ids, places, owners, spare=spare, read=read, turn=turn)
        moved[:-1] += 1
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        assert torch.equal(read[step % 2, :rows], fresh.cpu()) and turn.item() == step + 1
        assert torch.equal(ids, fresh.clamp(min=0)) and torch.equal(places, moved)
    before, last = read.clone(), torch.full_like(ids, 5)
    kernels.moved_on(last, ids, places, owners, spare=spare, read=None, turn=turn)
    assert torch.equal(read, before) and turn.item() == 3 and torch.equal(ids, last)
