"""The verifier's four rewards, and every loss against its formula in NumPy."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pytest
import torch

from examples.train.config import ModelConfig
from examples.train.dpo import References, orpo_loss
from examples.train.dpo import make_loss as pair_loss
from examples.train.errors import TrainError
from examples.train.grpo import divergence
from examples.train.grpo import make_loss as grpo_loss
from examples.train.model import Decoder
from examples.train.ppo import clipped_value, estimate, gae, whiten
from examples.train.ppo import make_loss as ppo_loss
from examples.train.reward import pair_batch, reward_loss
from examples.train.rewards import final_number, group_advantages, has_format, numbers, verifier_reward
from examples.train.rollout import PolicyOptions, clipped_policy
from examples.train.stage import with_score

PAIRS = [
    {"prompt": [4, 5, 6], "chosen": [7, 8, 2], "rejected": [9, 2]},
    {"prompt": [10, 11], "chosen": [12, 2], "rejected": [13, 14, 15, 16, 2]},
    {"prompt": [3], "chosen": [17, 18, 19, 2], "rejected": [20, 2]},
]


@pytest.mark.parametrize(
    ("text", "gold", "reward"),
    [
        ("6 * 7 = 42\n<answer>42</answer>", "42", 1.2),
        ("<answer>The total is $1,042.00</answer>", "1042", 1.2),
        ("<answer>6 * 7 = 42</answer>", "42", 1.2),
        ("<answer>-3</answer>", "-3", 1.2),
        ("<answer>0.5</answer>", ".50", 1.2),
        ("<answer>\n72\n</answer>", "#### 72", 1.2),
        ("so it is 42.", "42", 1.0),
        ("<answer>41</answer> no: <answer>42</answer>", "42", 1.0),
        ("<answer>42</answer></answer>", "42", 1.0),
        ("<answer>42", "42", 1.0),
        ("<answer>41</answer> or 42", "42", 0.2),
        ("42 <answer>unsure</answer>", "42", 0.2),
        ("<answer></answer>", "42", 0.2),
        ("<answer>3</answer>", "-3", 0.2),
        ("<answer>42.01</answer>", "42", 0.2),
        ("", "42", 0.0),
        ("I do not know", "42", 0.0),
        ("42 and then 43", "42", 0.0),
        ("<answer>42</answer><answer>43</answer>", "42", 0.0),
        ("<ANSWER>42</ANSWER> 7", "42", 0.0),
        ("no gold", "", 0.0),
    ],
)
def test_the_four_rewards(text: str, gold: str, reward: float) -> None:
    assert verifier_reward(text, gold) == pytest.approx(reward)


def test_numbers_are_read_as_people_write_them() -> None:
    assert numbers("1,234.50 and 12,34, then 7-3 = 4, f(2)-1, -5 and .25") == [
        Decimal(n) for n in ("1234.50", "12", "34", "7", "3", "4", "2", "1", "-5", ".25")
    ]
    assert numbers("no ४२ here") == []
    assert final_number("<answer>x</answer> 5") is None and final_number("a 5 b") == 5
    assert not has_format("</answer><answer>5") and has_format("a<answer>5</answer>b")


def test_group_advantages_compare_with_the_group() -> None:
    rewards = np.array([[1.2, 0.2, 0.0, 1.0], [0.2, 0.2, 0.2, 0.2]])
    expected = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-4)
    found = group_advantages(torch.tensor(rewards.ravel(), dtype=torch.float32), 4)
    np.testing.assert_allclose(found.numpy(), expected.ravel(), rtol=1e-5, atol=1e-6)
    assert not found[4:].any()


def model(seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    found = Decoder(ModelConfig(24, 16, 2, 2, 1, 8, 24, max_context=32, precision="fp32"))
    for parameter in found.parameters():
        parameter.data.mul_(5 if parameter.ndim > 1 else 1)
    return found


def log_p(net: Decoder, prompt: list[int], reply: list[int]) -> list[float]:
    """log p of each token of the reply, one row at a time, softmax in NumPy."""
    with torch.no_grad():
        logits = net(torch.tensor([[*prompt, *reply]]))[0].double().numpy()
    shifted = logits - logits.max(-1, keepdims=True)
    table = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return [table[len(prompt) + i - 1, token] for i, token in enumerate(reply)]


def sigmoid(x: float) -> float:
    return 1 / (1 + np.exp(-x))


def both(net: Decoder, pair: dict) -> tuple[float, float]:
    return sum(log_p(net, pair["prompt"], pair["chosen"])), sum(log_p(net, pair["prompt"], pair["rejected"]))


def test_dpo_is_its_formula() -> None:
    policy, reference, beta = model(0), model(1), 0.3
    references = References(reference, PAIRS, False, torch.device("cpu"))
    references.learn([0, 1, 2])
    loss = pair_loss("dpo", beta)(policy, references.batch([2, 0]))
    expected = 0.0
    for pair in (PAIRS[2], PAIRS[0]):
        (chosen, rejected), (ref_chosen, ref_rejected) = both(policy, pair), both(reference, pair)
        expected += -np.log(sigmoid(beta * ((chosen - ref_chosen) - (rejected - ref_rejected))))
    assert loss.total.item() == pytest.approx(expected, rel=1e-4) and loss.weight == 2


def test_orpo_is_its_formula() -> None:
    policy, weight = model(0), 0.4
    loss = pair_loss("orpo", weight)(policy, pair_batch(PAIRS))
    expected = 0.0
    for pair in PAIRS:
        chosen, rejected = (np.mean(log_p(policy, pair["prompt"], pair[name])) for name in ("chosen", "rejected"))
        odds = [np.exp(value) / (1 - np.exp(value)) for value in (chosen, rejected)]
        expected += -chosen + weight * -np.log(sigmoid(np.log(odds[0] / odds[1])))
    assert loss.total.item() == pytest.approx(expected, rel=1e-4)
    # Likely answers, whose odds are far from their probabilities.
    chosen, rejected = np.array([-0.05, -3.0]), np.array([-2.0, -0.2])
    odds = [np.exp(value) / (1 - np.exp(value)) for value in (chosen, rejected)]
    expected = -chosen + weight * -np.log(sigmoid(np.log(odds[0] / odds[1])))
    np.testing.assert_allclose(orpo_loss(torch.tensor(chosen), torch.tensor(rejected), weight).numpy(), expected)
    assert torch.isfinite(orpo_loss(torch.zeros(1), torch.tensor([-1.0]), weight)).all()


def test_kto_is_its_formula_on_both_sides_of_its_bound() -> None:
    signs: set[bool] = set()  # with policy and reference exchanged, the distance has the other sign
    for seeds in ((0, 1), (1, 0)):
        check_kto(model(seeds[0]), model(seeds[1]), signs)
    assert signs == {True, False}


def check_kto(policy: Decoder, reference: Decoder, signs: set[bool]) -> None:
    beta = 0.25
    references = References(reference, PAIRS, True, torch.device("cpu"))
    references.learn([1, 2])
    loss = pair_loss("kto", beta)(policy, references.batch([1, 2]))
    strange = [
        sum(log_p(policy, a["prompt"], b["chosen"])) - sum(log_p(reference, a["prompt"], b["chosen"]))
        for a, b in ((PAIRS[1], PAIRS[2]), (PAIRS[2], PAIRS[0]))
    ]
    signs.add(bool(np.mean(strange) > 0))
    baseline = max(np.mean(strange), 0)
    expected = 0.0
    for pair in PAIRS[1:]:
        (chosen, rejected), (ref_chosen, ref_rejected) = both(policy, pair), both(reference, pair)
        expected += 1 - sigmoid(beta * (chosen - ref_chosen - baseline))
        expected += 1 - sigmoid(beta * (baseline - (rejected - ref_rejected)))
    assert loss.total.item() == pytest.approx(expected, rel=1e-4) and loss.weight == 4
    loss.total.backward()  # the baseline carries no gradient, the answers do
    assert policy.norm.weight.grad.abs().sum() > 0


def test_the_reference_is_asked_once_for_each_row() -> None:
    passes, reference = [], model(1)
    reference.register_forward_hook(lambda _, given, __: passes.append(len(given[0])))
    references = References(reference, PAIRS, False, torch.device("cpu"))
    for rows in ([0, 1], [1, 2], [0, 2], [2]):
        references.learn(rows)
        references.batch(rows)
    assert passes == [4, 2]  # rows 0 and 1, then row 2: the chosen and the rejected answer of each


def test_unknown_methods_are_refused() -> None:
    with pytest.raises(TrainError, match="--method is 'ipo', expected one of dpo, orpo, kto"):
        pair_loss("ipo", 0.1)


def test_bradley_terry_is_its_formula_at_the_last_tokens() -> None:
    scorer = with_score(model())
    torch.nn.init.normal_(scorer.scalar.weight)
    loss = reward_loss(scorer, pair_batch(PAIRS))
    expected, right = 0.0, 0
    for pair in PAIRS:
        scores = []
        for name in ("chosen", "rejected"):
            with torch.no_grad():
                hidden = scorer(torch.tensor([[*pair["prompt"], *pair[name]]]), hidden=True)
            scores.append(hidden[0, -1].double().numpy() @ scorer.scalar.weight[0].detach().double().numpy())
        expected += np.log(1 + np.exp(-(scores[0] - scores[1])))
        right += scores[0] > scores[1]
    assert loss.total.item() == pytest.approx(expected, rel=1e-4)
    assert int(loss.metrics["accuracy"]) == right


def test_gae_is_its_definition() -> None:
    random = np.random.default_rng(0)
    discount, trace = 0.9, 0.8
    spans = [(2, 7), (0, 3), (5, 6)]
    mask = np.zeros((3, 9))
    for row, (first, last) in zip(mask, spans, strict=True):
        row[first:last] = 1
    rewards, values = random.normal(size=(3, 9)) * mask, random.normal(size=(3, 9))
    expected = np.zeros((3, 9))
    for b, (first, last) in enumerate(spans):
        for t in range(first, last):
            for s in range(t, last):  # A_t = sum over s >= t of (discount * trace)^(s - t) * delta_s
                after = values[b, s + 1] if s + 1 < last else 0.0
                delta = rewards[b, s] + discount * after - values[b, s]
                expected[b, t] += (discount * trace) ** (s - t) * delta
    found = gae(*(torch.tensor(x, dtype=torch.float64) for x in (rewards, values, mask)), discount, trace)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-12)


def test_the_reward_falls_on_the_last_token_and_distance_costs() -> None:
    batch = {
        "mask": torch.tensor([[0, 1, 1, 0], [0, 0, 1, 1.0]]),
        "last": torch.tensor([3, 4]),
        "old": torch.tensor([[0, -1.0, -2, 0], [0, 0, -1, -3]]),
        "reference": torch.tensor([[0, -1.5, -1, 0], [0, 0, -1, -1]]),
    }
    options = PolicyOptions(kl=0.1, discount=1.0, trace=1.0)
    found = estimate(batch, torch.tensor([1.2, 0.2]), torch.zeros(2, 4), options)
    # With nothing discounted and no values, a place's return is all that is still to come.
    last = [[0, 1.2 + 0.1 * 1 - 0.1 * 0.5, 1.2 + 0.1 * 1, 0], [0, 0, 0.2 + 0.1 * 2, 0.2 + 0.1 * 2]]
    np.testing.assert_allclose(found["returns"].numpy(), last, atol=1e-6)
    whole = found["advantages"][batch["mask"] == 1]
    assert float(whole.mean()) == pytest.approx(0, abs=1e-6)
    assert float(whole.pow(2).mean()) == pytest.approx(1, rel=1e-4)
    assert not found["advantages"][batch["mask"] == 0].any()
    assert torch.allclose(whiten(torch.ones(1, 3), torch.ones(1, 3)), torch.zeros(1, 3))


def test_clipping_is_its_formula() -> None:
    random = np.random.default_rng(1)
    new, old, advantages = (random.normal(size=(4, 5)) for _ in range(3))
    ratio = np.exp(new - old)
    expected = -np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages)
    found = clipped_policy(*(torch.tensor(x) for x in (new, old, advantages)), 0.2)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)
    expected = 0.5 * np.maximum((new - advantages) ** 2, (old + np.clip(new - old, -0.2, 0.2) - advantages) ** 2)
    found = clipped_value(*(torch.tensor(x) for x in (new, old, advantages)), 0.2)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)
    distance = divergence(torch.tensor(new), torch.tensor(old)).numpy()
    np.testing.assert_allclose(distance, np.exp(old - new) - (old - new) - 1, rtol=1e-9)
    assert distance.min() >= 0


@pytest.mark.parametrize("method", ["grpo", "ppo"])
def test_a_step_makes_the_better_answer_likelier(method: str) -> None:
    policy = with_score(model())
    pair = PAIRS[1]
    batch = pair_batch([pair])
    with torch.no_grad():
        logits = policy(batch["tokens"]).log_softmax(-1)
        old = logits[:, :-1].gather(-1, batch["tokens"][:, 1:, None])[..., 0] * batch["mask"]
    advantages = torch.tensor([[1.0], [-1.0]]) * batch["mask"]
    zeros = torch.zeros_like(old)
    batch |= {"old": old, "reference": old, "rewards": torch.tensor([1.2, 0.0]), "advantages": advantages}
    batch |= {"values": zeros, "returns": zeros}
    make = {"grpo": grpo_loss, "ppo": ppo_loss}[method]
    before = both(policy, pair)
    loss = make(PolicyOptions())(policy, batch)
    # Where the policy is still the one that wrote, ratios are 1 and the distance is 0.
    assert float(loss.total.detach()) == pytest.approx(-float(advantages.sum()), abs=1e-3)
    assert float(loss.weight) == 7 and float(loss.metrics["reward"]) / 7 == pytest.approx(0.6)
    (loss.total / loss.weight).backward()
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.grad is not None:
                parameter -= 1e-3 * parameter.grad
    after = both(policy, pair)
    assert after[0] > before[0] and after[1] < before[1]


def test_options_of_a_policy_are_checked() -> None:
    for options, said in (({"task": "poems"}, "--task is 'poems'"), ({"temperature": 0}, "temperature is 0")):
        with pytest.raises(TrainError, match=said):
            PolicyOptions(**options)
    with pytest.raises(TrainError, match="option speed"):
        PolicyOptions.of({"speed": 1}, {})
    assert PolicyOptions.of({"group": 4}, {"group": None, "kl": 0.5}) == PolicyOptions(group=4, kl=0.5)
