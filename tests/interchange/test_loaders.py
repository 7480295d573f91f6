"""Other trainers read exported rows with their own code. ``nox -s loaders`` installs TRL and verl.

slime and prime-rl are in no package index (the package ``slime`` there is another project), so their structures are
declared here with the fields of their sources; that shows less than the loaders themselves would.
"""

from __future__ import annotations

import warnings
from collections import defaultdict

import msgspec
import numpy as np
import pytest
import torch
from tests.interchange.conftest import branching_row

from areal_actors.interchange import export_rows
from areal_actors.models import load_policy, resolve_model

ROWS = branching_row()


@pytest.fixture
def policy():
    """The tiny model and its tokenizer."""
    from transformers import AutoTokenizer

    path = resolve_model("tiny").path
    return load_policy(path), AutoTokenizer.from_pretrained(path)


@pytest.fixture
def trl_dataset(tmp_path, write_step):
    """The rows as ``datasets`` loads them."""
    pytest.importorskip("trl", reason="pip install trl")
    from datasets import load_dataset

    export_rows(write_step(ROWS), "trl", tmp_path / "trl")
    return load_dataset(
        "parquet", data_dir=str(tmp_path / "trl" / "data"), split="train", cache_dir=str(tmp_path / "cache")
    )


@pytest.mark.filterwarnings("default")  # of libraries that are not ours
def test_trl_sft_trains_the_masked_tokens(trl_dataset, policy, tmp_path):
    """The loss of a step is the mean negative log-likelihood of the tokens with mask 1, and of no others."""
    from trl import SFTConfig, SFTTrainer

    model, tokenizer = policy
    total, count = 0.0, 0
    for row in ROWS:
        ids = torch.tensor(row.token_ids[None].astype(np.int64))
        with torch.no_grad():
            logprobs = model(ids).logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None]).squeeze(-1)
        trained = torch.tensor(row.loss_mask[1:] == 1)
        total, count = total - logprobs[trained].sum().item(), count + int(trained.sum())
    config = SFTConfig(
        output_dir=str(tmp_path / "sft"),
        per_device_train_batch_size=len(ROWS),
        max_steps=1,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    trainer = SFTTrainer(model=model, args=config, train_dataset=trl_dataset, processing_class=tokenizer)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    assert losses == pytest.approx([total / count], rel=1e-3)


@pytest.mark.filterwarnings("default")
def test_trl_grpo_trains_replayed_rows(trl_dataset, policy, tmp_path):
    """A ``rollout_func`` returns the rows of each group; the loss sees their ids, masks and rewards."""
    from trl import GRPOConfig, GRPOTrainer

    from datasets import Dataset

    model, tokenizer = policy
    groups = defaultdict(list)
    for row in trl_dataset:
        groups[row["group"]].append(row)
    seen = []

    def replay(prompts, trainer):
        iterators = {name: iter(rows) for name, rows in groups.items()}
        rows = [next(iterators[name]) for name in prompts]
        seen.extend(rows)
        return {
            key: [row[key] for row in rows]
            for key in ("prompt_ids", "completion_ids", "logprobs", "env_mask", "reward")
        }

    def reward(completions, reward, **_):
        return reward

    config = GRPOConfig(
        output_dir=str(tmp_path / "grpo"),
        per_device_train_batch_size=len(ROWS),
        num_generations=2,
        max_steps=1,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        shuffle_dataset=False,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": list(groups)}),
        processing_class=tokenizer,
        rollout_func=replay,
    )
    trainer.train()
    (metrics,) = [entry for entry in trainer.state.log_history if "reward" in entry]

    assert sorted(row["session"] for row in seen) == sorted(row.session for row in ROWS)
    assert metrics["reward"] == pytest.approx(np.mean([row.reward for row in ROWS]))
    assert metrics["completions/mean_length"] == pytest.approx(np.mean([row.loss_mask.sum() for row in ROWS]))


@pytest.mark.filterwarnings("default")
def test_verl_computes_advantages_and_losses(tmp_path, write_step):
    """Its ``DataProto`` holds the batch, and its own functions take the tensors."""
    pytest.importorskip("verl", reason="pip install verl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from verl import DataProto
        from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, compute_policy_loss_vanilla
        from verl.workers.config import ActorConfig

    export_rows(write_step(ROWS), "verl", tmp_path / "verl")
    data = DataProto.from_dict(**torch.load(tmp_path / "verl" / "batch_0.pt", weights_only=False))
    data.check_consistency()
    data.save_to_disk(tmp_path / "batch.pkl")
    batch = DataProto.load_from_disk(tmp_path / "batch.pkl").batch
    advantages, _ = compute_grpo_outcome_advantage(
        batch["token_level_rewards"], batch["response_mask"], data.non_tensor_batch["uid"]
    )

    mask = batch["response_mask"] == 1
    assert len(data) == len(ROWS)
    assert int(mask.sum()) == sum(int(row.loss_mask.sum()) for row in ROWS)
    assert (advantages.sign() * mask == batch["advantages"].sign()).all()  # the rewards differ within each group
    loss, *_ = compute_policy_loss_vanilla(
        old_log_prob=batch["old_log_probs"],
        log_prob=batch["old_log_probs"],
        advantages=batch["advantages"],
        response_mask=batch["response_mask"],
        loss_agg_mode="token-mean",
        config=ActorConfig(strategy="fsdp", rollout_n=2, ppo_micro_batch_size_per_gpu=1),
    )
    expected = -np.concatenate([row.advantages[row.loss_mask == 1] for row in ROWS]).mean()
    assert loss.item() == pytest.approx(expected, rel=1e-5)


class MicroBatch(msgspec.Struct, array_like=True, gc=False, omit_defaults=True):
    """The fields of prime-rl's struct up to the first optional ones."""

    input_ids: list[int]
    loss_mask: list[bool]
    advantages: list[float]
    inference_logprobs: list[float]
    position_ids: list[int]
    sequence_lengths: list[int]
    temperatures: list[float]
    env_names: list[str]
    seq_lens: list[int]
    ref_logprobs: list[float] | None = None
    trace_ids: list[str] | None = None


def test_prime_rl_batches_decode_as_its_struct(tmp_path, write_step):
    """Required fields by position, optional ones by default; arrays of a batch have the length of its ids."""
    export_rows(write_step(ROWS), "prime-rl", tmp_path / "prime")
    content = (tmp_path / "prime" / "step_0" / "rank_0.bin").read_bytes()
    batches = msgspec.msgpack.Decoder(type=list[MicroBatch]).decode(content)

    for batch, row in zip(batches, ROWS, strict=True):
        arrays = (batch.loss_mask, batch.advantages, batch.inference_logprobs, batch.position_ids, batch.temperatures)
        assert {len(row.token_ids)} == {len(batch.input_ids), len(batch.env_names), *map(len, arrays)}
        assert batch.sequence_lengths == batch.seq_lens == [len(row.token_ids)]
        assert batch.position_ids == list(range(len(row.token_ids)))
        assert min(batch.temperatures) > 0
        assert (batch.ref_logprobs, batch.trace_ids) == (None, None)
