"""Reinforcement learning, JAX and Paddle examples, Hugging Face's relatives, and programs that print no loss."""
# ruff: noqa: E501  (lines of logs are as long as the programs write them)

from ..bars import clock, tqdm_bar
from ..simulation import Log, Registry, Run

TRAINERS = Registry()


@TRAINERS.add(
    "stable-baselines3",
    "DLR-RM/stable-baselines3 stable_baselines3/common/logger.py HumanOutputFormat.write, ppo/ppo.py",
    '"| train/               |             |" then "|    loss              | 0.0123      |" rows between dashes',
    may_warn=("M104",),
)
def stable_baselines3(run: Run, log: Log) -> None:
    log.lines(
        "Using cuda device", "Wrapping the env with a `Monitor` wrapper", "Wrapping the env in a DummyVecEnv."
    )
    for point in run.points(120, 38.0, 6.0, 0.10):
        iteration, steps = point.idx + 1, (point.idx + 1) * 2048
        rows: list[tuple[str, object]] = [("rollout/", ""), ("   ep_len_mean", 21.0 + 400 * point.accuracy)]
        rows += [
            ("   ep_rew_mean", 21.0 + 400 * point.accuracy),
            ("time/", ""),
            ("   fps", int(1021 / point.pace)),
        ]
        rows += [
            ("   iterations", iteration),
            ("   time_elapsed", int(point.seconds * 2)),
            ("   total_timesteps", steps),
        ]
        if iteration > 1:
            rows += [("train/", ""), ("   approx_kl", 0.008 + 0.002 * point.draw), ("   clip_fraction", 0.09)]
            rows += [("   clip_range", 0.2), ("   entropy_loss", -0.62), ("   explained_variance", 0.41)]
            rows += [
                ("   learning_rate", 0.0003),
                ("   loss", point.loss),
                ("   n_updates", 10 * (iteration - 1)),
            ]
            rows += [("   policy_gradient_loss", -0.0141), ("   value_loss", point.loss * 2.1)]
        texts = [(key, f"{value:<8.3g}" if isinstance(value, float) else str(value)) for key, value in rows]
        width, value_width = max(len(key) for key, _ in texts), max(len(text) for _, text in texts)
        dashes = "-" * (width + value_width + 7)
        log.lines(dashes, *(f"| {key:<{width}} | {text:<{value_width}} |" for key, text in texts), dashes)
        log.steps = (steps, iteration, 10 * (iteration - 1))
        log.losses, log.tolerance, log.rate = (point.loss,), 0.02, float(int(1021 / point.pace))


@TRAINERS.add(
    "cleanrl",
    "vwxyzjn/cleanrl cleanrl/ppo.py",
    '"global_step={}, episodic_return={}" and "SPS: {}"; losses go to TensorBoard only',
    has_loss=False,
)
def cleanrl(run: Run, log: Log) -> None:
    for point in run.points(300):
        log.line(
            f"global_step={point.idx * 512 + int(point.draw * 400)}, episodic_return=[{20 + 400 * point.accuracy:.1f}]"
        )
        if point.idx % 4 == 3:
            log.line(f"SPS: {int(1800 / point.pace)}")


@TRAINERS.add(
    "gensim",
    "piskvorky/gensim gensim/models/word2vec.py _log_progress",
    '"EPOCH %i - PROGRESS: at %.2f%% examples, %.0f words/s, in_qsize %i, out_qsize %i": no loss',
    has_loss=False,
    errors="plain",
)
def gensim(run: Run, log: Log) -> None:
    for point in run.points(100):
        epoch, inside = divmod(point.idx, 20)
        log.line(
            f"{run.at(point.seconds):%Y-%m-%d %H:%M:%S},120 : INFO : EPOCH {epoch} - PROGRESS: at {5 * (inside + 1):.2f}% examples, "
            f"{912331 / point.pace:.0f} words/s, in_qsize 5, out_qsize 0"
        )


@TRAINERS.add(
    "flax-examples",
    "google/flax examples/mnist/train.py",
    "'epoch:% 3d, train_loss: %.4f, train_accuracy: %.2f, test_loss: %.4f, test_accuracy: %.2f' through absl logging",
    errors="jax",
)
def flax_examples(run: Run, log: Log) -> None:
    log.line(f"I0302 {run.began:%H:%M:%S}.551213 140212 main.py:49] JAX process: 0 / 1")
    for point in run.points(60, 0.61, 0.03, 0.02):
        log.line(
            f"I0302 {run.at(point.seconds * 6):%H:%M:%S}.{int(point.draw * 1e6):06d} 140212 train.py:172] epoch:{point.idx + 1: 3d}, "
            f"train_loss: {point.loss:.4f}, train_accuracy: {100 * point.accuracy:.2f}, test_loss: {point.valid_loss:.4f}, "
            f"test_accuracy: {100 * point.accuracy - 0.4:.2f}"
        )
        log.steps, log.losses, log.tolerance = (point.idx + 1,), (point.loss,), 0.02


@TRAINERS.add(
    "allennlp",
    "allenai/allennlp allennlp/training/util.py description_from_metrics, callbacks/console_logger.py",
    'bar label "accuracy: 0.6123, batch_loss: 0.9, loss: 1.02 ||:  12%|#2 | 30/250 [...]", a table "loss | 0.613 | 0.701" per epoch',
    errors="old_torch",
)
def allennlp(run: Run, log: Log) -> None:
    epochs, shown, batches = 10, 25, 250
    head = "INFO - allennlp.training"
    losses: list[float] = []
    for point in run.points(epochs * shown, 1.61, 0.22, 0.03):
        epoch, inside = divmod(point.idx, shown)
        now = f"{run.at(point.seconds):%Y-%m-%d %H:%M:%S},417"
        if inside == 0:
            log.line(f"{now} - {head}.gradient_descent_trainer - Epoch {epoch}/{epochs - 1}")
            log.line(f"{now} - {head}.gradient_descent_trainer - Worker 0 memory usage: 2.1G")
            log.line(f"{now} - {head}.gradient_descent_trainer - GPU 0 memory usage: 1.4G")
            log.line(f"{now} - {head}.gradient_descent_trainer - Training")
            losses = []
        losses.append(point.loss)
        mean = sum(losses) / len(losses)
        done = (inside + 1) * batches // shown
        label = f"accuracy: {point.accuracy:.4f}, batch_loss: {point.loss:.4f}, loss: {mean:.4f} ||"
        log.bar(tqdm_bar(done, batches, inside + 1, 10.0 / point.pace, label))
        log.steps, log.losses, log.tolerance = (
            (epoch * batches + done, done, epoch, epoch + 1),
            (mean, point.loss),
            0.02,
        )
        if inside == shown - 1:
            logger = f"{now} - {head}.callbacks.console_logger"
            log.line()
            log.line(f"{logger} -                     Training |  Validation")
            log.line(
                f"{logger} - accuracy           |  {point.accuracy:8.3f}  |  {point.accuracy - 0.01:8.3f}"
            )
            log.line(f"{logger} - gpu_0_memory_MB    |  {1432.1:8.3f}  |  {'N/A':>8s}")
            log.line(f"{logger} - loss               |  {mean:8.3f}  |  {point.valid_loss:8.3f}")
            log.line(f"{now} - {head}.gradient_descent_trainer - Epoch duration: 0:00:25.182411")


@TRAINERS.add(
    "accelerate",
    "huggingface/accelerate examples/alst_ulysses_sequence_parallelism/sp-alst.py",
    '"batch {iter}: seqlen: ..." and f"{iter}: {loss=}", which prints "12: loss=tensor(2.1034, device=...)"',
)
def accelerate(run: Run, log: Log) -> None:
    for point in run.points(150, 3.1, 1.2, 0.03):
        log.line(f"batch {point.idx}: seqlen: {4096 + int(point.draw * 3) * 1024}")
        log.line(f"{point.idx}: loss=tensor({point.loss:.4f}, device='cuda:0', grad_fn=<DivBackward0>)")
        log.steps, log.losses = (point.idx, point.idx + 1), (point.loss,)


@TRAINERS.add(
    "paddleocr",
    "PaddlePaddle/PaddleOCR tools/program.py train",
    "'epoch: [{}/{}], iter: {}, {}, reader_cost: {:.5f} s, batch_cost: {:.5f} s, samples: {}, ips: {:.5f}'",
    errors="paddle",
)
def paddleocr(run: Run, log: Log) -> None:
    log.line(f"[{run.began:%Y/%m/%d %H:%M:%S}] root INFO: Architecture : ")
    log.line(f"[{run.began:%Y/%m/%d %H:%M:%S}] root INFO:     Backbone : ")
    log.line(f"[{run.began:%Y/%m/%d %H:%M:%S}] root INFO: Loss : ")
    log.line(f"[{run.began:%Y/%m/%d %H:%M:%S}] root INFO:     alpha : 5")
    log.line(f"[{run.began:%Y/%m/%d %H:%M:%S}] root INFO:     main_loss_type : DiceLoss")
    for point in run.points(200, 6.8, 1.6, 0.04):
        step = (point.idx + 1) * 10
        log.line(
            f"[{run.at(point.seconds * 9):%Y/%m/%d %H:%M:%S}] root INFO: epoch: [{1 + step // 125}/16], iter: {step}, "
            f"lr: {1e-3 * point.lr_share:.6f}, loss: {point.loss:.6f}, loss_shrink_maps: {point.loss * 0.5:.6f}, "
            f"loss_threshold_maps: {point.loss * 0.3:.6f}, loss_binary_maps: {point.loss * 0.1:.6f}, reader_cost: 0.01321 s, "
            f"batch_cost: {0.91 * point.pace:.5f} s, samples: 80, ips: {87.9 / point.pace:.5f}"
        )
        log.steps, log.losses, log.rate = (step,), (point.loss,), 87.9 / point.pace
        if step % 500 == 0:
            log.bar(tqdm_bar(63, 63, 7, 8.6, "eval model:") + "\n")
            hmean = point.accuracy
            log.line(
                f"[{run.at(point.seconds * 9):%Y/%m/%d %H:%M:%S}] root INFO: cur metric, precision: {hmean}, recall: {hmean}, "
                f"hmean: {hmean}, fps: 21.9"
            )


@TRAINERS.add(
    "sentence-transformers",
    "huggingface/sentence-transformers trainer.py, with the dict lines of transformers 4",
    "{'loss': 0.5123, 'grad_norm': 2.1, 'learning_rate': 1.9e-05, 'epoch': 0.32}; {'eval_loss': ..., 'eval_runtime': ...}",
    filters_nan=True,
)
def sentence_transformers(run: Run, log: Log) -> None:
    total, every = 1500, 10
    for point in run.points(total // every, 1.9, 0.31, 0.06):
        step = (point.idx + 1) * every
        loss = 0.0 if point.loss != point.loss else round(point.loss, 4)
        values = {"loss": loss, "grad_norm": point.grad_norm, "learning_rate": 2e-5 * point.lr_share}
        values["epoch"] = round(step / 500, 2)
        log.bar(tqdm_bar(step, total, point.seconds * 2, 5.0 / point.pace) + "\n")
        log.line(str(values))
        if step % 500 == 0:
            log.bar(tqdm_bar(32, 32, 2, 16.0) + "\n")
            log.line(
                f"{{'eval_loss': {point.valid_loss}, 'eval_runtime': 2.0113, 'eval_steps_per_second': 15.9, 'epoch': 1.0}}"
            )
        log.steps, log.losses = (step,), (loss,)
    if run.finished:
        log.line(
            "{'train_runtime': 311.2, 'train_samples_per_second': 77.1, 'train_loss': 0.61, 'epoch': 3.0}"
        )
        log.bar(tqdm_bar(total, total, 311, 4.82) + "\n")


@TRAINERS.add(
    "whisper-finetune",
    "huggingface/transformers examples/pytorch/speech-recognition (Seq2SeqTrainer), trainer_callback.py PrinterCallback",
    "with disable_tqdm the dict is printed alone: {'loss': 0.91, ..., 'epoch': 1.2} and {'eval_loss': ..., 'eval_wer': ...}",
    filters_nan=True,
)
def whisper_finetune(run: Run, log: Log) -> None:
    log.line("***** Running training *****")
    log.lines("  Num examples = 11,225", "  Num Epochs = 6", "  Total optimization steps = 4,000")
    for point in run.points(160, 2.4, 0.02, 0.05):
        step = (point.idx + 1) * 25
        loss = 0.0 if point.loss != point.loss else round(point.loss, 4)
        values = {"loss": loss, "grad_norm": point.grad_norm, "learning_rate": 1e-5 * point.lr_share}
        log.line(str(values | {"epoch": round(step / 702, 2)}))
        if step % 1000 == 0:
            log.lines("***** Running Evaluation *****", "  Num examples = 5405", "  Batch size = 8")
            log.line(
                str(
                    {
                        "eval_loss": point.valid_loss,
                        "eval_wer": 31.2,
                        "eval_runtime": 801.1,
                        "epoch": step / 702,
                    }
                )
            )
        log.losses, log.tolerance = (loss,), 0.03
    if run.finished:
        log.line(
            "{'train_runtime': 10311.2, 'train_samples_per_second': 6.2, 'train_loss': 0.21, 'epoch': 5.7}"
        )
        log.lines("", "", f"Training completed. Do not forget to share your model, total {clock(10311)}")


@TRAINERS.add(
    "lightning-rich",
    "Lightning-AI/pytorch-lightning src/lightning/pytorch/callbacks/progress/rich_progress.py",
    '"Epoch 3/11 ━━━━━━━━╸━━━━ 100/250 0:00:05 • 0:00:08 19.02it/s v_num: 3.000 train_loss: 2.310" repainted with cursor codes',
)
def lightning_rich(run: Run, log: Log) -> None:
    epochs, shown, batches = 12, 20, 240
    for point in run.points(epochs * shown, 4.6, 0.9, 0.02):
        epoch, inside = divmod(point.idx, shown)
        done = (inside + 1) * batches // shown
        filled = done * 30 // batches
        bar = f"\x1b[38;2;98;6;224m{'━' * filled}\x1b[0m\x1b[38;5;237m{'━' * (30 - filled)}\x1b[0m"
        text = f"\x1b[37mEpoch {epoch}/{epochs - 1}\x1b[0m {bar} \x1b[37m{done}/{batches}\x1b[0m \x1b[37m{clock(done / 19)} • {clock((batches - done) / 19)}\x1b[0m \x1b[37m{19.0 / point.pace:.2f}it/s\x1b[0m \x1b[37mv_num: 3.000 train_loss: {point.loss:.3f}\x1b[0m"
        log.parts.append("\r\x1b[2K" + text)
        log.steps, log.losses = (epoch * batches + done, done), (point.loss,)
        if inside == shown - 1:
            log.line()
    if run.finished:
        log.line("`Trainer.fit` stopped: `max_epochs=12` reached.")
