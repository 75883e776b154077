"""transformers.Trainer: swapped in by optimizer_cls_and_kwargs, the same training as with torch.optim.AdamW."""

import copy

import pytest
import torch
from harness import assert_same_run, params_of
from training import (
    LARGE,
    LENGTH,
    MAX_NORM,
    MODES,
    VOCABULARY,
    Run,
    assert_same_training,
    package,
    sequences,
    switch_on,
)

from fused_accum import FusedAccumAdamW

transformers = package("transformers")
package("accelerate")
pytestmark = pytest.mark.usefixtures("one_thread")

ACCUMULATION, ROWS, EPOCHS = 4, 10, 2  # windows of 4, 4 and 2, twice
UPDATES = 6


def gpt2():
    """Conv1D and a tied head."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=8, n_layer=1, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).double()


def llama(dtype=torch.float32):
    """nn.Linear and RMSNorm, which works in float32 whatever the model is."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=LENGTH, hidden_size=8, intermediate_size=12,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(dtype)


def trainer_for(model, rows, folder, cls, mode="plain", callbacks=(), extra=None, **options):
    arguments = {
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": ACCUMULATION, "num_train_epochs": EPOCHS,
        "max_grad_norm": MAX_NORM, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True,
        "disable_tqdm": True, "lr_scheduler_type": "linear", "learning_rate": LARGE["lr"], "weight_decay": 0.3,
        "dataloader_pin_memory": False, **options,
    }  # fmt: skip
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(output_dir=str(folder), **arguments),
        train_dataset=rows,
        optimizer_cls_and_kwargs=(cls, {"lr": LARGE["lr"], "betas": LARGE["betas"], **(extra or {})}),
        callbacks=list(callbacks),
    )
    if mode != "plain":
        switch_on(mode, trainer.create_optimizer(), model)
    return trainer


def finished(trainer) -> Run:
    optimizer = trainer.optimizer
    curve = [(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "loss" in row]
    return Run(trainer.model, getattr(optimizer, "optimizer", optimizer), curve)


def trained(*args, resume=None, **kwargs) -> Run:
    trainer = trainer_for(*args, **kwargs)
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return finished(trainer)


@pytest.fixture(scope="module")
def torchs(tmp_path_factory):
    """The same training with torch.optim.AdamW, per model, with a checkpoint in the second epoch; never mutated."""
    runs = {}
    for build in (gpt2, llama):
        torch.manual_seed(1)
        model, rows = build(), sequences(ROWS)
        start, folder = copy.deepcopy(model), tmp_path_factory.mktemp(build.__name__)
        run = trained(model, rows, folder, torch.optim.AdamW, save_strategy="steps", save_steps=4)
        assert all(norm > MAX_NORM for _, norm in run.curve)
        runs[build] = start, rows, run, folder / "checkpoint-4"
    return runs


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("build", [gpt2, llama])
def test_same_training_and_resumed_from_a_checkpoint(torchs, tmp_path, build, mode):
    """Accumulation 4, clipping, a token-normalised loss, the tail window of two, checkpoint and resume."""
    start, rows, expected, _ = torchs[build]
    model = copy.deepcopy(start)
    ours = trained(model, rows, tmp_path, FusedAccumAdamW, mode, save_strategy="steps", save_steps=4)
    assert type(ours.optimizer) is FusedAccumAdamW
    assert len(ours.optimizer.param_groups) == 2  # the Trainer's: with decay and without
    assert_same_training(ours, expected, UPDATES)
    saved = torch.load(tmp_path / "checkpoint-4" / "optimizer.pt", weights_only=True)
    assert all(entries.keys() == {"step", "exp_avg", "exp_avg_sq"} for entries in saved["state"].values())
    again = trained(
        copy.deepcopy(start), rows, tmp_path, FusedAccumAdamW, mode, resume=tmp_path / "checkpoint-4"
    )
    assert_same_training(again, expected, UPDATES)


@pytest.mark.parametrize("mode", ["plain", "in-backward"])
def test_a_checkpoint_of_torchs_is_resumed_and_ours_by_torch(torchs, tmp_path, mode):
    start, rows, expected, checkpoint = torchs[gpt2]
    ours = trained(copy.deepcopy(start), rows, tmp_path, FusedAccumAdamW, mode, resume=checkpoint)
    assert_same_training(ours, expected, UPDATES)
    trained(copy.deepcopy(start), rows, tmp_path, FusedAccumAdamW, mode, save_strategy="steps", save_steps=5)
    back = trained(copy.deepcopy(start), rows, tmp_path, torch.optim.AdamW, resume=tmp_path / "checkpoint-5")
    assert_same_training(back, expected, UPDATES)


class Watch(transformers.TrainerCallback):
    """Looks at the gradients while a window is open, and compares its sum with the micro-batches'."""

    def __init__(self, model):
        self.addresses, self.sums, self.sizes, self.windows = {}, {}, {}, 0
        for p in model.parameters():
            p.register_hook(lambda g, p=p: self.seen(p, g))

    def seen(self, p, g):
        self.sums[p] = self.sums.get(p, 0) + g.double()
        self.sizes[p] = self.sizes.get(p, 0) + g.double().abs()

    def on_substep_end(self, args, state, control, model, **_):
        for p in model.parameters():
            assert p.grad.dtype == torch.float32
            assert self.addresses.setdefault(p, p.grad.data_ptr()) == p.grad.data_ptr()

    def on_pre_optimizer_step(self, args, state, control, model, **_):
        self.on_substep_end(args, state, control, model)
        for p in model.parameters():
            assert ((p.grad - self.sums.pop(p)).abs() <= ACCUMULATION * 2.0**-24 * self.sizes.pop(p)).all()
        self.windows += 1


def test_bf16_sums_in_float32_and_masters_are_resumed_bit_for_bit(tmp_path):
    """p.grad is one float32 buffer all along; the checkpoint holds masters; Trainer's clip is off to see the sums."""
    start, rows = llama(torch.bfloat16), sequences(ROWS)
    runs = []
    for resume in (None, tmp_path / "checkpoint-4"):
        model = copy.deepcopy(start)
        watch = Watch(model)
        trainer = trainer_for(
            model, rows, tmp_path, FusedAccumAdamW, "in-backward", [watch], save_strategy="steps", save_steps=4,
            max_grad_norm=0.0, extra={"master_weights": "fp32", "max_grad_norm": MAX_NORM},
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume and str(resume))
        assert watch.windows == (2 if resume else UPDATES)
        runs.append(finished(trainer).optimizer)
    assert_same_run(*runs)
    assert all("master" in runs[0].state[p] for p in params_of(runs[0]))
    assert float(runs[0].grad_norm) > MAX_NORM


def test_a_backward_out_of_memory_is_tried_again_with_half_the_batch(tmp_path):
    """auto_find_batch_size starts anew in the same optimizer, with half a micro-batch left in p.grad."""
    start, rows = gpt2(), sequences(8)
    runs = []
    for cls, mode in ((torch.optim.AdamW, "plain"), (FusedAccumAdamW, "in-backward"), (FusedAccumAdamW, "direct")):
        model, failures = copy.deepcopy(start), iter([False, True])

        def fail(g, failures=failures):
            if next(failures, False):
                raise torch.OutOfMemoryError("CUDA out of memory.")

        model.transformer.h[0].ln_1.weight.register_hook(fail)
        runs.append(
            trained(
                model, rows, tmp_path, cls, mode, auto_find_batch_size=True, per_device_train_batch_size=2,
                gradient_accumulation_steps=2, num_train_epochs=1,
            )
        )  # fmt: skip
        assert next(failures, None) is None
    for ours in runs[1:]:
        assert_same_training(ours, runs[0], updates=4)
