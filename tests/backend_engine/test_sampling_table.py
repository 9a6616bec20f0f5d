"""The sampling parameters of running requests on the device: all of a row, once a step reads them."""

import torch
from promptsluice.backend_engine.params import SamplingParams
from promptsluice.backend_engine.sampling_table import SamplingTable


def test_rows_are_greedy_until_the_refresh_that_brings_all_of_their_parameters() -> None:
    table, rows, drawn = SamplingTable(4, torch.device("cpu")), torch.tensor([3, 0]), torch.tensor([5, 6])
    warm = SamplingParams(temperature=0.75, top_p=0.5, min_p=0.25, top_k=40)
    table.enter(3, warm, seed=2**62 + 1, prompt=7)
    assert table.rows(rows, drawn=drawn).temperature.tolist() == [0, 0], "what is not refreshed was sent"
    table.refresh()
    found = table.rows(rows, drawn=drawn)
    assert found.temperature.tolist() == [0.75, 0] and found.top_p.tolist() == [0.5, 1] and found.min_p[0] == 0.25
    assert found.top_k.tolist() == [40, 0] and found.seed.tolist() == [2**62 + 1, 0] and found.drawn.tolist() == [5, 6]
    assert table.after(torch.tensor([9]), torch.tensor([3])).drawn.tolist() == [9 + 1 - 7]


def test_a_row_that_is_given_again_has_the_newest_parameters() -> None:
    table = SamplingTable(2, torch.device("cpu"))
    for temperature in (1.0, 0.5):
        table.enter(1, SamplingParams(temperature=temperature), seed=3, prompt=1)
        table.refresh()
    assert table.rows(torch.tensor([1]), drawn=torch.tensor([0])).temperature.tolist() == [0.5]
