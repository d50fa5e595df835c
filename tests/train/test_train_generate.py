"""Sampling with the static cache: the tokens of a full forward pass, and the filters that they are drawn under."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from examples.train.config import ModelConfig
from examples.train.errors import TrainError
from examples.train.generate import GREEDY, Sampling, choose, cut, generate, generator, probabilities, steps
from examples.train.model import Decoder
from shaders.sampling import Sampling as Reference
from shaders.sampling import survivors

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19], [20, 21]]


def decoder(**changes: object) -> Decoder:
    torch.manual_seed(3)
    shape = {"vocab_size": 50, "dim": 32, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn_dim": 48}
    model = Decoder(ModelConfig(**{**shape, "max_context": 300, "precision": "fp32", **changes}))
    for parameter in model.parameters():  # far from uniform, so that greedy choices are clear
        parameter.data.mul_(6 if parameter.ndim > 1 else 1)
    return model


def alone(
    model: Decoder, prompt: list[int], count: int, pick: Callable[[torch.Tensor], int] = lambda row: int(row.argmax())
) -> list[int]:
    """Token by token, each from a full forward pass over everything so far."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(pick(model(torch.tensor([tokens]))[0, -1]))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("shape", [{}, {"sub_norms": True, "activation": "relu2", "kv_heads": 4}, {"kv_heads": 1}])
def test_ragged_prompts_get_what_each_gets_alone(shape: dict[str, object]) -> None:
    model = decoder(**shape)
    found = generate(model, PROMPTS, 20, GREEDY, ends=())
    assert found == [alone(model, prompt, 20) for prompt in PROMPTS]
    assert len({tuple(row) for row in found}) == len(PROMPTS)


def test_an_answer_longer_than_the_cache_window_goes_on() -> None:
    model = decoder()
    assert generate(model, [PROMPTS[0]], 140, GREEDY, ends=()) == [alone(model, PROMPTS[0], 140)]


def test_a_draw_depends_on_the_seed_and_on_what_came_before() -> None:
    model, sampling = decoder(), Sampling(1.0)
    device = torch.device("cpu")
    one, again, other = (generate(model, PROMPTS, 30, sampling, (), generator(device, seed)) for seed in (1, 1, 2))
    assert one == again != other
    # The first row's draws, by hand from full passes with the same random numbers.
    random = generator(device, 4)
    expected = alone(model, [5, 6], 12, lambda row: int(torch.multinomial(row.softmax(-1)[None], 1, generator=random)))
    assert generate(model, [[5, 6]], 12, sampling, (), generator(device, 4)) == [expected]


def test_answers_stop_at_their_end() -> None:
    model = decoder()
    whole = generate(model, PROMPTS, 24, GREEDY, ends=())
    end = whole[0][5]
    expected = [cut(row, {end}) for row in whole]
    assert expected[0][-1] == end and len(expected[0]) <= 6
    assert generate(model, PROMPTS, 24, GREEDY, ends={end}) == expected
    assert cut([1, 2, 3, 2], {2}) == [1, 2] and cut([1, 3], {2}) == [1, 3] and cut([], {2}) == []


def test_generation_stops_when_all_have_ended() -> None:
    model = decoder()
    first = {row[0] for row in generate(model, PROMPTS, 1, GREEDY, ends=())}
    passes = []
    model.register_forward_hook(lambda *_: passes.append(1))
    assert [len(row) for row in generate(model, PROMPTS, 100, GREEDY, ends=first)] == [1] * len(PROMPTS)
    assert len(passes) < 20


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 7},
        {"temperature": 1.3, "top_p": 0.6},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
        {"temperature": 1.0, "top_p": 1e-6},
    ],
)
def test_the_filters_keep_what_the_engines_keep(options: dict[str, float]) -> None:
    logits = torch.randn(40, 60, generator=torch.Generator().manual_seed(0)) * 3
    found = probabilities(logits, Sampling(**options)).numpy()
    for row, ours in zip(logits.numpy(), found, strict=True):
        weights = survivors(row, Reference(**options)).astype(np.float64)
        # The engines' weights are whole numbers of 2^-31: what rounds to none there has next to no chance here.
        assert not ours[weights == 0].max(initial=0) > 1e-8
        np.testing.assert_allclose(ours, weights / weights.sum(), atol=2e-6)


def test_draws_follow_the_probabilities() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -9.0]])
    sampling = Sampling(1.0, top_k=4)
    count = 20_000
    drawn = choose(logits.expand(count, 5), sampling, torch.Generator().manual_seed(1))
    shares = np.bincount(drawn.numpy(), minlength=5) / count
    expected = probabilities(logits, sampling)[0].numpy()
    assert shares[4] == 0
    # Four standard deviations of a share.
    assert np.all(np.abs(shares - expected) <= 4 * np.sqrt(expected * (1 - expected) / count))


def test_what_does_not_fit_is_refused() -> None:
    model = decoder(max_context=16)
    with pytest.raises(TrainError, match=r"11 tokens and 6 new ones do not fit the context of 16"):
        generate(model, PROMPTS, 6, GREEDY, ends=())
    assert len(generate(model, PROMPTS, 5, GREEDY, ends=())[2]) == 5
    for prompts in ([], [[1], []]):
        with pytest.raises(TrainError, match="without tokens"):
            next(steps(model, prompts, 1, GREEDY))
    for options, said in (({"temperature": -1}, "temperature"), ({"top_p": 0}, "top-p"), ({"min_p": 2}, "min-p")):
        with pytest.raises(TrainError, match=f"--{said} is"):
            Sampling(**options)
