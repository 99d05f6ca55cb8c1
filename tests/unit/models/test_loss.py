import pytest
import torch
from torch.nn.functional import cross_entropy, one_hot

from stretto.models import per_sample_accuracy, per_sample_loss


def test_each_sample_has_its_own_cross_entropy():
    logits, targets = torch.randn(5, 3), torch.tensor([0, 1, 2, 0, 1])
    expected = [cross_entropy(logits[i], targets[i]) for i in range(5)]
    torch.testing.assert_close(per_sample_loss(logits, targets), torch.stack(expected))


def test_tokens_count_by_their_mean_within_the_sample():
    logits, targets = torch.randn(2, 7, 3), torch.randint(3, (2, 7))
    expected = [cross_entropy(logits[i], targets[i]) for i in range(2)]
    torch.testing.assert_close(per_sample_loss(logits, targets), torch.stack(expected))


@pytest.mark.parametrize("shape", [(5, 7), (5, 3, 7)], ids=["classes", "tokens"])
def test_smoothing_moves_its_fraction_of_the_target_to_all_classes(shape):
    logits, targets = torch.randn(shape, dtype=torch.float64), torch.randint(7, shape[:-1])
    target = one_hot(targets, 7) * 0.9 + 0.1 / 7
    expected = -(target * logits.log_softmax(-1)).sum(-1).view(5, -1).mean(1)
    torch.testing.assert_close(per_sample_loss(logits, targets, 0.1), expected)


def test_mass_on_the_wrong_classes_only_equals_a_slightly_larger_smoothing():
    logits, targets = torch.randn(5, 7, dtype=torch.float64), torch.randint(7, (5,))
    right = one_hot(targets, 7)
    target = right * 0.9 + (1 - right) * 0.1 / 6
    expected = -(target * logits.log_softmax(-1)).sum(-1)
    torch.testing.assert_close(per_sample_loss(logits, targets, 0.1 * 7 / 6), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_logits_are_converted_to_float32(dtype):
    logits, targets = torch.randn(4, 9).to(dtype), torch.tensor([0, 3, 5, 8])
    losses = per_sample_loss(logits, targets)
    assert losses.dtype == torch.float32
    assert torch.equal(losses, per_sample_loss(logits.float(), targets))


def test_float64_stays_float64():
    logits = torch.randn(4, 9, dtype=torch.float64)
    assert per_sample_loss(logits, torch.tensor([0, 3, 5, 8])).dtype == torch.float64


def test_correct_is_the_share_of_right_answers():
    logits = torch.eye(3)
    assert per_sample_accuracy(logits, torch.tensor([0, 1, 0])).tolist() == [1, 1, 0]
    assert per_sample_accuracy(logits[None], torch.tensor([[0, 2, 2]])).tolist() == pytest.approx(
        [2 / 3]
    )


@pytest.mark.parametrize(("outputs", "targets"), [((0, 3), (0,)), ((0, 7, 3), (0, 7))])
@pytest.mark.parametrize("measure", [per_sample_loss, per_sample_accuracy])
def test_no_samples_give_no_values(outputs, targets, measure):
    assert measure(torch.zeros(outputs), torch.zeros(targets).long()).shape == (0,)


def test_the_loss_of_no_samples_still_has_a_gradient():
    logits = torch.zeros(0, 3, requires_grad=True)
    per_sample_loss(logits, torch.zeros(0).long()).sum().backward()
    assert logits.grad.shape == (0, 3)
