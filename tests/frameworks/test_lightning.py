"""Lightning: automatic and manual optimization, and its wrapper, which is a subclass of ours without our state."""

import contextlib
import copy
import logging

import pytest
import torch
from harness import assert_same_run, params_of
from training import (
    LARGE,
    MAX_NORM,
    MODES,
    Net,
    Run,
    assert_same_training,
    mean_loss,
    net,
    package,
    sequences,
    switch_on,
    trained_by_hand,
    trained_tokens,
)

from fused_accum import FusedAccumAdamW

lightning = package("pytorch_lightning")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # of Lightning itself, and of the windows of one and of two here
    pytest.mark.filterwarnings(
        "ignore:.*LeafSpec", "ignore:The 'train_dataloader' does not have many workers", "ignore:the scales of this"
    ),
]
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)

ACCUMULATION, ROWS, EPOCHS = 4, 10, 2  # windows of 4, 4 and 2, twice
UPDATES = 6


class Automatic(lightning.LightningModule):
    def __init__(self, start: Net, cls: type, mode: str = "plain", **options):
        super().__init__()
        self.net, self.cls, self.mode, self.options, self.curve = copy.deepcopy(start), cls, mode, options, []

    def configure_optimizers(self):
        optimizer = self.cls(self.net.parameters(), **LARGE, **self.options)
        switch_on(self.mode, optimizer, self.net)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, total_iters=UPDATES)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def training_step(self, batch, index):
        loss = mean_loss(self.net(batch["input_ids"]), batch["labels"])
        self.curve.append(loss.item())
        return loss


def fitted(model, rows, folder, resume=None, **options):
    options = {"max_epochs": EPOCHS, **options}
    trainer = lightning.Trainer(
        accelerator="cpu", default_root_dir=folder, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(rows, batch_size=1), ckpt_path=resume)
    return trainer


def run_of(trainer, model) -> Run:
    return Run(model.net, trainer.optimizers[0], model.curve)


AUTOMATIC = {"accumulate_grad_batches": ACCUMULATION, "gradient_clip_val": MAX_NORM}


@pytest.fixture(scope="module")
def data():
    torch.manual_seed(3)
    return net(), sequences(ROWS)


@pytest.fixture(scope="module")
def torchs(data, tmp_path_factory):
    model = Automatic(data[0], torch.optim.AdamW)
    return run_of(fitted(model, data[1], tmp_path_factory.mktemp("torch"), **AUTOMATIC), model)


@pytest.mark.parametrize("mode", MODES)
def test_automatic_optimization_and_resumed_from_a_checkpoint(data, torchs, tmp_path, mode):
    start, rows = data
    model = Automatic(start, FusedAccumAdamW, mode)
    ours = fitted(model, rows, tmp_path, **AUTOMATIC)
    assert_same_training(run_of(ours, model), torchs, UPDATES)

    model = Automatic(start, FusedAccumAdamW, mode)
    half = fitted(model, rows, tmp_path, max_epochs=1, **AUTOMATIC)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed = Automatic(start, FusedAccumAdamW, mode)
    resumed.curve = model.curve
    again = fitted(resumed, rows, tmp_path, resume=tmp_path / "half.ckpt", **AUTOMATIC)
    assert_same_training(run_of(again, resumed), torchs, UPDATES)


class Manual(Automatic):
    """Token-weighted windows on the wrapper that ``self.optimizers()`` gives; the mode is chosen there too."""

    automatic_optimization = False

    def configure_optimizers(self):
        return self.cls(self.net.parameters(), **LARGE, **self.options)

    def on_train_start(self):
        switch_on(self.mode, self.optimizers(), self.net)
        self.own = set(vars(self.optimizers()))

    def training_step(self, batch, index):
        optimizer, inner = self.optimizers(), self.trainer.optimizers[0]
        assert type(optimizer).__name__ == "LightningFusedAccumAdamW"
        last = (index + 1) % ACCUMULATION == 0 or index + 1 == ROWS
        loss, tokens = mean_loss(self.net(batch["input_ids"]), batch["labels"]), trained_tokens(batch["labels"])
        self.curve.append(loss.item())
        self.add(optimizer, loss, tokens, last)
        if last:
            self.finish(optimizer)
        window = 0 if last else index % ACCUMULATION + 1
        assert optimizer.pending == inner.pending
        assert inner.pending.microbatches == window
        assert set(vars(optimizer)) == self.own

    def add(self, optimizer, loss, tokens, last):
        if self.mode == "plain":
            self.manual_backward(loss)
            optimizer.accumulate(weight=tokens)
        else:
            self.manual_backward(optimizer.scale_loss(loss, weight=tokens))

    def finish(self, optimizer):
        optimizer.step()


class LastFolded(Manual):
    """The window's last micro-batch goes to step()."""

    def add(self, optimizer, loss, tokens, last):
        self.tokens = tokens
        self.manual_backward(loss)
        if not last:
            optimizer.accumulate(weight=tokens)

    def finish(self, optimizer):
        optimizer.step(weight=self.tokens)


class InClosure(LastFolded):
    """Lightning's own form: the last backward runs inside step()."""

    def add(self, optimizer, loss, tokens, last):
        self.tokens, self.loss = tokens, loss
        if not last:
            super().add(optimizer, loss, tokens, last)

    def finish(self, optimizer):
        optimizer.step(closure=lambda: self.manual_backward(self.loss), weight=self.tokens)


class SteppedInBackward(Manual):
    """The update inside the last backward, without a clip."""

    def add(self, optimizer, loss, tokens, last):
        if last:
            with optimizer.step_in_backward():
                self.manual_backward(optimizer.scale_loss(loss, weight=tokens))
        else:
            super().add(optimizer, loss, tokens, last)

    def finish(self, optimizer):
        pass


@pytest.mark.parametrize(
    ("kind", "mode"),
    [*((Manual, mode) for mode in MODES), (LastFolded, "plain"), (InClosure, "plain")]
    + [(SteppedInBackward, mode) for mode in MODES],
)
def test_manual_optimization_on_the_wrapper(data, tmp_path, kind, mode):
    start, rows = data
    max_norm = None if kind is SteppedInBackward else MAX_NORM
    model = kind(start, FusedAccumAdamW, mode, max_grad_norm=max_norm)
    trainer = fitted(model, rows, tmp_path, max_epochs=1)
    assert trainer.global_step == 3
    assert_same_training(run_of(trainer, model), trained_by_hand(start, rows, ACCUMULATION, max_norm), updates=3)


class Everything(Automatic):
    """Whatever else the wrapper offers, all in one training step, against the same calls on an optimizer."""

    automatic_optimization = False

    def configure_optimizers(self):
        return self.cls(self.net.hidden.parameters(), **LARGE, **self.options)

    def training_step(self, batch, index):
        wrapper, inner = self.optimizers(), self.trainer.optimizers[0]
        own = set(vars(wrapper))
        twin = copy.deepcopy(self.net)
        expected = self.cls(twin.hidden.parameters(), **LARGE, **self.options)

        def backward(scale=1.0):
            for model in (self.net, twin):
                (scale * mean_loss(model(batch["input_ids"]), batch["labels"])).backward()

        def both(call):
            call(wrapper)
            call(expected)
            assert set(vars(wrapper)) == own
            assert_same_run(inner, expected)

        backward()
        both(lambda opt: opt.accumulate())
        with pytest.warns(UserWarning, match="dropped 1 accumulated"):
            wrapper.zero_grad()
        with pytest.warns(UserWarning, match="dropped 1 accumulated"):
            expected.zero_grad()
        backward()
        both(lambda opt: opt.accumulate())
        backward()
        both(lambda opt: opt.discard_microbatch())
        both(lambda opt: opt.add_param_group({"params": [(twin if opt is expected else self.net).gain], "lr": 0.1}))
        backward()
        both(lambda opt: opt.step())
        assert float(wrapper.grad_norm) == float(expected.grad_norm) == float(inner.grad_norm) > 0
        assert wrapper.skipped_steps == 0
        assert len(wrapper.grad_norms()) == 3
        backward(float("inf"))
        both(lambda opt: opt.step())
        assert wrapper.skipped_steps == inner.skipped_steps == 1
        saved = copy.deepcopy(wrapper.state_dict())  # loading shares tensors, as torch's does
        backward()
        both(lambda opt: opt.step())
        both(lambda opt: opt.load_state_dict(copy.deepcopy(saved)))
        assert all(float(state["step"]) == 1 for state in inner.state.values())
        backward()
        both(lambda opt: opt.step())
        self.curve.append(index)


def test_nothing_stays_on_the_wrapper(data, tmp_path):
    start, rows = data
    model = Everything(start, FusedAccumAdamW, max_grad_norm=MAX_NORM, skip_nonfinite="step")
    fitted(model, rows[:1], tmp_path, max_epochs=1)
    assert model.curve == [0]


class TwoOptimizers(Automatic):
    """As for a GAN: toggling freezes the other one's parameters in the middle of its window."""

    automatic_optimization = False

    def configure_optimizers(self):
        first = self.net.hidden
        ours = {id(p) for p in first.parameters()}
        optimizers = [
            self.cls(first.parameters(), **LARGE),
            self.cls([p for p in self.net.parameters() if id(p) not in ours], **LARGE),
        ]
        for optimizer in optimizers:
            if self.mode == "in-backward":
                optimizer.accumulate_in_backward()
        return optimizers

    def training_step(self, batch, index):
        for optimizer, period in zip(self.optimizers(), (2, 5)):
            with optimizer.toggle_model():
                loss = mean_loss(self.net(batch["input_ids"]), batch["labels"]) / period
                self.curve.append(loss.item())
                self.manual_backward(loss)
                if (index + 1) % period == 0:
                    optimizer.step()
                    optimizer.zero_grad()


@pytest.mark.parametrize("mode", ["plain", "in-backward"])
def test_two_optimizers_that_are_toggled(data, tmp_path, mode):
    start, rows = data
    models = [TwoOptimizers(start, FusedAccumAdamW, mode), TwoOptimizers(start, torch.optim.AdamW)]
    trainers = [fitted(model, rows, tmp_path, max_epochs=1) for model in models]
    for place, updates in enumerate((5, 2)):
        optimizers = [trainer.optimizers[place] for trainer in trainers]
        nets = [torch.nn.ParameterList(params_of(optimizer)) for optimizer in optimizers]
        runs = [Run(net, optimizer, model.curve) for net, optimizer, model in zip(nets, optimizers, models)]
        assert_same_training(*runs, updates)


class Scaled(lightning.plugins.MixedPrecision):
    """Without autocast, whose rounding is not what is compared."""

    def autocast_context_manager(self):
        return contextlib.nullcontext()


@pytest.mark.parametrize("mode", MODES)
def test_mixed_precision_unscales_and_clips(data, tmp_path, mode):
    """precision="16-mixed" makes this plugin on a GPU. The second window overflows."""
    start, rows = data[0].float(), data[1]
    runs = []
    for cls in (FusedAccumAdamW, torch.optim.AdamW):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        plugin = Scaled("16-mixed", "cpu", scaler=scaler)
        model = Automatic(start, cls, mode if cls is FusedAccumAdamW else "plain")
        infinite = iter([False] * 5 + [True])

        def overflow(g, infinite=infinite):
            return g * float("inf") if next(infinite, False) else g

        model.net.gain.register_hook(overflow)
        trainer = fitted(model, rows, tmp_path, max_epochs=1, plugins=[plugin], **AUTOMATIC)
        runs.append(run_of(trainer, model))
        assert scaler.get_scale() == 2.0**9
    assert_same_training(*runs, updates=2)


def test_fused_with_a_scaler_and_a_clip_is_lightnings_error(data, tmp_path):
    plugin = Scaled("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    model = Automatic(data[0].float(), FusedAccumAdamW, fused=True)
    with pytest.raises(RuntimeError, match="FusedAccumAdamW, does not allow for gradient clipping"):
        fitted(model, data[1], tmp_path, plugins=[plugin], **AUTOMATIC)
