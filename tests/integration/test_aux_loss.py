"""The auxiliary loss of transformers' models: layer by layer, as a plain formula has it, and counted once."""

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from integration.test_train import make_trainer
from mxep.integration.config import ConfigError
from mxep.integration.launch import Rank, run_ranks
from mxep.integration.schema import Config
from mxep.integration.transformers.model import CausalLM

COEF = 0.1
SIZES = "model.dim=32", "model.hidden_dim=32", "model.experts=4", "data.batch=8", "recipe=bf16"
ALONE = *SIZES, "parallel.ranks=1", "parallel.device=cpu", "train.precision=32-true"
QWEN = "model=qwen3_moe_tiny", f"model.transformers.router_aux_loss_coef={COEF}"
MIXTRAL = (
    *("model=mixtral_8x7b", "model.layers=2", "model.heads=2", "model.transformers.num_key_value_heads=2"),
    *("model.transformers.vocab_size=256", f"model.transformers.router_aux_loss_coef={COEF}"),
)


def plain(logits: Tensor, top_k: int) -> Tensor:
    """K times Switch Transformer's loss of one layer, expert by expert."""
    probabilities = logits.flatten(0, -2).softmax(-1)
    rows = probabilities.topk(top_k).indices.flatten().tolist()
    experts = range(logits.shape[-1])
    return top_k * len(experts) * sum(rows.count(e) / len(rows) * probabilities[:, e].mean() for e in experts)


def gradients_of(trainer, loss: Callable[[CausalLM, Tensor, Tensor], Tensor]) -> dict[str, Tensor]:
    """Of a step, whose `CausalLM.loss` is another."""
    with mock.patch.object(CausalLM, "loss", loss):
        trainer._backward(*trainer._batch(trainer.text.train, 0, 0))
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters()}


def by_hand(model: CausalLM, inputs: Tensor, targets: Tensor) -> Tensor:
    """The loss with the auxiliary one of logits that transformers itself returns."""
    out = model.model(input_ids=inputs, use_cache=False, output_router_logits=True)
    sizes = model.model.config
    aux = sum(plain(logits, sizes.num_experts_per_tok) for logits in out.router_logits) / sizes.num_hidden_layers
    loss = F.cross_entropy(out.logits.flatten(0, 1), targets.flatten())
    return loss + COEF * (aux - aux.detach())


def compare(rank: Rank, config: Config, folder: Path) -> dict[str, float]:
    """How far each gradient is from that by hand, and how far that is from one without an auxiliary loss."""
    trainer = make_trainer(rank, config, folder)
    own = CausalLM.loss
    found = gradients_of(trainer, own)
    wanted = gradients_of(trainer, by_hand)
    trainer.model.aux_weight = 0.0
    without = gradients_of(trainer, own)
    distance = lambda a, b: max(float((a[n] - b[n]).norm() / b[n].norm()) for n in b if "gate.weight" in n)  # noqa: E731
    return {"by hand": distance(found, wanted), "without": distance(without, wanted)}


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("model", [QWEN, MIXTRAL], ids=["qwen3_moe", "mixtral"])
def test_the_auxiliary_gradient_is_that_of_the_mean_of_each_layers_loss(
    make_config: Callable[..., Config], tmp_path: Path, model: tuple[str, ...], micro_batches: int
):
    config = make_config(*model, *ALONE, f"train.micro_batches={micro_batches}")
    (found,) = run_ranks(compare, (config, tmp_path), world_size=1, timeout=60, device="cpu")
    assert found["by hand"] < 1e-5  # all is fp32
    assert found["without"] > 0.1


def computed(rank: Rank, config: Config, folder: Path) -> dict[str, object]:
    """Of a step: whether transformers computes a loss of its own, or holds logits; and what is left of them."""
    trainer = make_trainer(rank, config, folder)
    model = trainer.model
    out = model(trainer._batch(trainer.text.train, 0, 0)[0])
    trainer.train_step()
    left = [router.logits for router in model.routers]
    trainer.validate()
    return {
        "aux_loss": out.aux_loss,
        "router_logits": out.router_logits,
        "left": left + [router.logits for router in model.routers],
        "said": model.model.config.output_router_logits,
    }


@pytest.mark.parametrize("checkpointing", ["false", "true"])
def test_transformers_computes_no_loss_of_its_own_and_no_logits_are_left(
    make_config: Callable[..., Config], tmp_path: Path, checkpointing: str
):
    config = make_config(*QWEN, *ALONE, f"train.activation_checkpointing={checkpointing}")
    (found,) = run_ranks(computed, (config, tmp_path), world_size=1, timeout=60, device="cpu")
    assert found["aux_loss"] is found["router_logits"] is None
    assert found["left"] == [None] * 2 * config.model.layers
    assert found["said"] is True


def refusal(rank: Rank, config: Config, folder: Path) -> str:
    with mock.patch.object(PreTrainedModel, "can_record_outputs", {}), pytest.raises(ConfigError) as error:
        make_trainer(rank, config, folder)
    return str(error.value)


def test_models_that_do_not_say_what_their_logits_are_refuse_the_loss(
    make_config: Callable[..., Config], tmp_path: Path
):
    (message,) = run_ranks(refusal, (make_config(*QWEN, *ALONE), tmp_path), world_size=1, timeout=60, device="cpu")
    assert message.startswith("model.transformers.output_router_logits: got true, want false: models of qwen3_moe")
