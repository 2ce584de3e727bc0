"""Older and specialised programs: compiled trainers, estimators, segmentation, graphs, robots."""
# ruff: noqa: E501  (lines of logs are as long as the programs write them)

import math

from ..bars import clock, tqdm_bar
from ..simulation import Log, Registry, Run

TRAINERS = Registry()


@TRAINERS.add(
    "caffe",
    "BVLC/caffe src/caffe/solver.cpp Solver::Step",
    '"Iteration 100 (8.1 iter/s, 12.3s/100 iters), loss = 2.3", then one line for each output and "Iteration 100, lr = 0.01"',
    errors="plain",
)
def caffe(run: Run, log: Log) -> None:
    head = "4123 solver.cpp"
    for point in run.points(200, 2.31, 0.3, 0.03):
        step, now = (
            point.idx * 100,
            f"I0302 {run.at(point.seconds * 12):%H:%M:%S}.{int(point.draw * 1e6):06d}  ",
        )
        if step % 1000 == 0:
            log.line(f"{now}{head}:347] Iteration {step}, Testing net (#0)")
            log.line(f"{now}{head}:414]     Test net output #0: accuracy = {point.accuracy:.4f}")
            log.line(
                f"{now}{head}:414]     Test net output #1: loss = {point.valid_loss:.6g} (* 1 = {point.valid_loss:.6g} loss)"
            )
        log.line(
            f"{now}{head}:239] Iteration {step} ({8.13 / point.pace:.6g} iter/s, {12.3 * point.pace:.6g}s/100 iters), loss = {point.loss:.6g}"
        )
        log.line(
            f"{now}{head}:258]     Train net output #0: loss = {point.loss:.6g} (* 1 = {point.loss:.6g} loss)"
        )
        log.line(f"{now}4123 sgd_solver.cpp:112] Iteration {step}, lr = {0.01 * point.lr_share:.6g}")
        log.steps, log.losses, log.rate = (step,), (point.loss,), 8.13 / point.pace
    if run.finished:
        log.line("I0302 12:00:00.000001  4123 solver.cpp:332] Optimization Done.")


@TRAINERS.add(
    "darknet",
    "AlexeyAB/darknet src/detector.c train_detector",
    '"\\n %d: %f, %f avg loss, %f rate, %lf seconds, %d images, %f hours left\\n"',
    errors="plain",
)
def darknet(run: Run, log: Log) -> None:
    log.lines(
        "yolov4-custom",
        "Learning Rate: 0.001, Momentum: 0.949, Decay: 0.0005",
        " Detection layer: 139 - type = 28 ",
    )
    mean = None
    for point in run.points(300, 1400.0, 1.4, 0.05):
        step = point.idx * 10 + 1
        mean = point.loss if mean is None else 0.9 * mean + 0.1 * point.loss
        log.line(
            f"v3 (iou loss, Normalizer: (iou: 0.07, obj: 1.00, cls: 1.00) Region 139 Avg (IOU: 0.512318), count: 31, class_loss = {point.loss * 0.3:f}, iou_loss = {point.loss * 0.1:f}, total_loss = {point.loss * 0.4:f} "
        )
        log.line(
            f"\n {step}: {point.loss:f}, {mean:f} avg loss, {1e-3 * point.lr_share:f} rate, {3.1 * point.pace:f} seconds, {step * 64} images, {4.1:f} hours left"
        )
        log.line("Loaded: 0.000051 seconds")
        log.steps, log.losses, log.tolerance = (step,), (point.loss, mean, point.loss * 0.4), 0.02


@TRAINERS.add(
    "deepspeech",
    "mozilla/DeepSpeech training/deepspeech_training/train.py",
    '"\\rEpoch 0 |   Training | Elapsed Time: 0:00:10 | Steps: 10 | Loss: 120.123456"; the same for Validation',
    errors="tensorflow",
)
def deepspeech(run: Run, log: Log) -> None:
    shown, losses = 20, [0.0]
    log.line("I STARTING Optimization")
    for point in run.points(15 * shown, 160.0, 21.0, 0.02):
        epoch, inside = divmod(point.idx, shown)
        losses = [point.loss] if inside == 0 else [*losses, point.loss]
        mean = sum(losses) / len(losses)
        log.bar(
            f"Epoch {epoch} |   Training | Elapsed Time: 0:{inside:02d}:12 | Steps: {(inside + 1) * 20} | Loss: {mean:f}"
        )
        log.steps, log.losses = ((inside + 1) * 20, epoch * 400 + (inside + 1) * 20), (mean,)
        if inside == shown - 1:
            log.line()
            log.bar(
                f"Epoch {epoch} | Validation | Elapsed Time: 0:01:12 | Steps: 40 | Loss: {point.valid_loss:f} | Dataset: dev.csv\n"
            )
            log.line(
                f"I Saved new best validating model with loss {point.valid_loss:f} to: checkpoints/best_dev-{(epoch + 1) * 400}"
            )
            log.line("-" * 80)
            log.steps, log.losses = (
                (*log.steps, 40, epoch, epoch + 1, (epoch + 1) * 400),
                (*log.losses, point.valid_loss),
            )


@TRAINERS.add(
    "fasttext",
    "facebookresearch/fastText src/fasttext.cc progressInfo",
    '"\\rProgress:  45.1% words/sec/thread:  123456 lr:  0.054900 avg.loss:  2.123456 ETA:   0h 1m12s"',
    errors="plain",
)
def fasttext(run: Run, log: Log) -> None:
    log.lines("Read 10M words", "Number of words:  218316", "Number of labels: 0")
    for point in run.points(300, 4.1, 1.6, 0.004):
        log.bar(
            f"Progress: {100 * (point.idx + 1) / 300:5.1f}% words/sec/thread: {int(71231 / point.pace):7d} lr: {0.05 * (1 - point.idx / 300):9.6f} "
            f"avg.loss: {point.loss:9.6f} ETA:   0h{(300 - point.idx) // 60:2d}m{point.idx % 60:2d}s"
        )
        log.losses = (point.loss,)
    if run.finished:
        log.line()


@TRAINERS.add(
    "gpt-neox",
    "EleutherAI/gpt-neox megatron/logging.py training_log",
    '" samples/sec: {:.3f} | iteration {:8d}/{:8d} | elapsed time per iteration (ms): {:.1f} | learning rate: {:.3E} | approx flops per GPU: .. | lm_loss: {:.6E} | ..."',
)
def gpt_neox(run: Run, log: Log) -> None:
    log.lines(
        "NeoXArgs.from_ymls() ['configs/125M.yml']",
        "  gradient_clipping ............... 1.0",
        "  lr_decay_style .................. cosine",
    )
    for point in run.points(250, 10.9, 2.9, 0.01):
        step = (point.idx + 1) * 10
        log.line(
            f" samples/sec: {91.2 / point.pace:.3f} | iteration {step:8d}/{2500:8d} | elapsed time per iteration (ms): {351.1 * point.pace:.1f} | "
            f"learning rate: {6e-4 * point.lr_share:.3E} | approx flops per GPU: 91.2TFLOPS | lm_loss: {point.loss:.6E} | loss scale: 65536.0 | "
            f"number of skipped iterations: {0:3d} | number of nan iterations: {10 if math.isnan(point.loss) else 0:3d} |"
        )
        log.steps, log.losses, log.rate = (step,), (point.loss,), 91.2 / point.pace
        if step % 1000 == 0:
            log.line("-" * 100)
            log.line(
                f" validation results at iteration {step} | lm_loss value: {point.valid_loss:.6E} | lm_loss_ppl value: 3.1E+01 | "
            )
            log.line("-" * 100)
            log.losses += (point.valid_loss,)


@TRAINERS.add(
    "llm.c",
    "karpathy/llm.c train_gpt2.cu",
    '"step %4d/%d | loss %7.6f (%+.2fz)| norm %6.4f (%+.2fz)| lr %.2e | %.2f ms | %.1f%% bf16 MFU | %.0f tok/s"; "val loss %f"',
    errors="plain",
)
def llm_c(run: Run, log: Log) -> None:
    log.block("""
        +-----------------------+----------------------------------------------------+
        | Parameter             | Value                                              |
        +-----------------------+----------------------------------------------------+
        | learning rate (LR)    | 6.000000e-04                                       |
        | val_loss_every        | 250                                                |
        | max_steps             | 1000                                               |
        +-----------------------+----------------------------------------------------+
        batch_size B=64 * seq_len T=1024 * num_processes=8 and total_batch_size=524288
        => setting grad_accum_steps=1
    """)
    for point in run.points(1000, 10.96, 3.4, 0.01):
        step = point.idx + 1
        if point.idx % 250 == 0:
            log.line(f"val loss {point.valid_loss:f}")
        log.line(
            f"step {step:4d}/1000 | loss {point.loss:7.6f} ({4 * point.draw - 2:+.2f}z)| norm {point.grad_norm:6.4f} ({2 * point.draw - 1:+.2f}z)| "
            f"lr {6e-4 * point.lr_share:.2e} | {339.2 * point.pace:.2f} ms | {58.1 / point.pace:.1f}% bf16 MFU | {1545321 / point.pace:.0f} tok/s"
        )
        log.steps, log.losses, log.rate = (step,), (point.loss,), 1545321 / point.pace
    if run.finished:
        log.lines("val loss 3.421", "total average iteration time: 339.514 ms")
        log.losses += (3.421,)


@TRAINERS.add(
    "nnunet",
    "MIC-DKFZ/nnUNet nnunetv2/training/nnUNetTrainer/nnUNetTrainer.py",
    '"2026-03-02 10:15:07.123456: train_loss -0.7123", "val_loss -0.69", "Pseudo dice [0.91, 0.88]": one line each, losses fall below 0',
)
def nnunet(run: Run, log: Log) -> None:
    for point in run.points(150, 2.0, 0.86, 0.006):
        now, loss, valid = (
            f"{run.at(point.seconds * 90)}.{int(point.draw * 1e6):06d}:",
            point.loss - 1.7,
            point.valid_loss - 1.72,
        )
        log.line(f"{now}  ")
        log.line(f"{now} Epoch {point.idx} ")
        log.line(f"{now} Current learning rate: {0.01 * (1 - point.idx / 150) ** 0.9:.5f} ")
        log.line(f"{now} train_loss {loss:.4f} ")
        log.line(f"{now} val_loss {valid:.4f} ")
        log.line(f"{now} Pseudo dice [{point.accuracy:.4f}, {point.accuracy - 0.03:.4f}] ")
        log.line(f"{now} Epoch time: {90.1 * point.pace:.2f} s ")
        log.steps, log.losses = (point.idx, point.idx + 1), (loss, valid)
        if point.idx % 50 == 3:
            log.line(f"{now} Yayy! New best EMA pseudo Dice: {point.accuracy:.4f} ")
    if run.finished:
        log.line(f"{run.at(20000)}.000001: Training done. ")


@TRAINERS.add(
    "pytorch-geometric",
    "pyg-team/pytorch_geometric torch_geometric/logging.py log",
    '"Epoch: 001, Loss: 1.9462, Train: 0.3500, Val: 0.2120, Test: 0.2190"',
    errors="old_torch",
)
def pytorch_geometric(run: Run, log: Log) -> None:
    for point in run.points(200, 1.95, 0.21, 0.02):
        acc = point.accuracy
        log.line(
            f"Epoch: {point.idx + 1:03d}, Loss: {point.loss:.4f}, Train: {acc:.4f}, Val: {acc - 0.1:.4f}, Test: {acc - 0.09:.4f}"
        )
        log.steps, log.losses = (point.idx + 1,), (point.loss,)
    if run.finished:
        log.line("Median time per epoch: 0.0031s")


@TRAINERS.add(
    "rasa",
    "RasaHQ/rasa rasa/utils/tensorflow/callback.py RasaTrainingLogger",
    '"Epochs:  45%|████▌ | 45/100 [00:21<00:26,  2.08it/s, t_loss=2.1, i_acc=0.912, e_f1=0.81]"',
    errors="tensorflow",
)
def rasa(run: Run, log: Log) -> None:
    log.line(
        "2026-03-02 10:15:07 INFO     rasa.engine.training.hooks  - Starting to train component 'DIETClassifier'."
    )
    for point in run.points(200, 9.1, 1.1, 0.02):
        epoch = point.idx + 1
        log.bar(
            tqdm_bar(
                epoch,
                200,
                epoch / 2,
                2.08 / point.pace,
                "Epochs",
                f"t_loss={point.loss:.3g}, i_acc={point.accuracy:.3g}, e_f1={point.accuracy - 0.1:.3g}",
            )
        )
        log.steps, log.losses, log.tolerance, log.rate = (epoch,), (point.loss,), 0.02, 2.08 / point.pace
    if run.finished:
        log.line(
            "\n2026-03-02 10:19:07 INFO     rasa.engine.training.hooks  - Finished training component 'DIETClassifier'."
        )


@TRAINERS.add(
    "rsl_rl",
    "leggedrobotics/rsl_rl rsl_rl/utils/logger.py",
    'a block per iteration: bold " Learning iteration 10/1500 ", "Total steps: ..", "Mean value loss: 0.0123", "Mean surrogate loss: -0.0031", "Mean reward: 12.31"',
    may_warn=("M104",),
)
def rsl_rl(run: Run, log: Log) -> None:
    for point in run.points(200, 3.1, 0.05, 0.05):
        log.line("#" * 80)
        log.line(f"\x1b[1m{f' Learning iteration {point.idx}/200 '.center(80)}\x1b[0m \n")
        rows = {
            "Total steps": (point.idx + 1) * 98304,
            "Steps per second": int(91231 / point.pace),
            "Collection time": f"{0.71:.3f}s",
            "Learning time": f"{0.31:.3f}s",
        }
        rows |= {
            "Mean value loss": f"{point.loss:.4f}",
            "Mean surrogate loss": f"{-0.006 * point.draw + 0.0 * point.loss:.4f}",
            "Mean entropy loss": f"{11.2 - point.idx / 40:.4f}",
        }
        rows |= {
            "Mean reward": f"{20 * point.accuracy:.2f}",
            "Mean episode length": f"{900 * point.accuracy:.2f}",
            "Mean action std": "0.81",
        }
        log.lines(*(f"{name + ':':>40} {value}" for name, value in rows.items()), "-" * 80)
        log.lines(
            f"{'Iteration time:':>40} {1.02 * point.pace:.2f}s",
            f"{'Time elapsed:':>40} {clock(point.seconds)}",
            f"{'ETA:':>40} {clock(200 - point.idx)}",
            "",
        )
        entropy = 11.2 - point.idx / 40
        log.steps, log.losses = (
            (point.idx, (point.idx + 1) * 98304),
            (point.loss, -0.006 * point.draw + 0.0 * point.loss, entropy),
        )


@TRAINERS.add(
    "stylegan3",
    "NVlabs/stylegan3 training/training_loop.py",
    '"tick {:<5d} kimg {:<8.1f} time {:<12s} sec/tick .. sec/kimg .. maintenance .. cpumem .. gpumem .. reserved .. augment {:.3f}": no loss',
    has_loss=False,
)
def stylegan3(run: Run, log: Log) -> None:
    log.lines("Training for 25000 kimg...", "")
    for point in run.points(200):
        log.line(
            f"tick {point.idx:<5d} kimg {point.idx * 4.0:<8.1f} time {clock(point.seconds * 90):<12s} sec/tick {90 * point.pace:<7.1f} sec/kimg {22.5 * point.pace:<7.2f} "
            f"maintenance {0.1:<6.1f} cpumem {4.1:<6.2f} gpumem {10.4:<6.2f} reserved {11.02:<6.2f} augment {0.001 * point.idx:.3f}"
        )


@TRAINERS.add(
    "tf-estimator",
    "tensorflow/tensorflow tensorflow/python/training/basic_session_run_hooks.py LoggingTensorHook, StepCounterHook",
    '"INFO:tensorflow:loss = 2.3, step = 101 (12.345 sec)" and "INFO:tensorflow:global_step/sec: 8.1"',
    errors="tensorflow",
)
def tf_estimator(run: Run, log: Log) -> None:
    log.lines(
        "INFO:tensorflow:Graph was finalized.",
        "INFO:tensorflow:Running local_init_op.",
        "INFO:tensorflow:Saving checkpoints for 0 into /tmp/model/model.ckpt.",
    )
    for point in run.points(200, 2.3, 0.3, 0.04):
        step = point.idx * 100 + 1
        if point.idx:
            log.line(f"INFO:tensorflow:global_step/sec: {8.1 / point.pace:g}")
        log.line(
            f"INFO:tensorflow:loss = {point.loss:.8g}, step = {step}"
            + (f" ({12.3 * point.pace:.3f} sec)" if point.idx else "")
        )
        log.steps, log.losses = (step,), (point.loss,)
    if run.finished:
        log.line(f"INFO:tensorflow:Loss for final step: {point.loss:.6g}.")


@TRAINERS.add(
    "trax",
    "google/trax trax/supervised/training.py Loop",
    '"Step    100: Ran 100 train steps in 12.31 secs", "Step    100: train CrossEntropyLoss |  8.12345678", "Step    100: eval  Accuracy |  0.12"',
    errors="jax",
)
def trax(run: Run, log: Log) -> None:
    log.line("\nStep      1: Total number of trainable weights: 47234304")
    for point in run.points(150, 9.1, 1.9, 0.015):
        step = (point.idx + 1) * 100
        log.line(f"\nStep {step: 6d}: Ran 100 train steps in {12.3 * point.pace:.2f} secs")
        log.line(f"Step {step: 6d}: train CrossEntropyLoss | {point.loss: .8f}")
        log.line(f"Step {step: 6d}: eval  CrossEntropyLoss | {point.valid_loss: .8f}")
        log.line(f"Step {step: 6d}: eval          Accuracy | {point.accuracy: .8f}")
        log.steps, log.losses = (step,), (point.loss, point.valid_loss)


@TRAINERS.add(
    "vits",
    "jaywalnut310/vits train.py",
    '"Train Epoch: 3 [45%]", then a bare list of losses, the step and the learning rate: "[2.41, 2.15, 5.1, 31.2, 1.9, 2.0, 1200, 0.0002]": no names',
    has_loss=False,
)
def vits(run: Run, log: Log) -> None:
    for point in run.points(200, 60.0, 20.0):
        stamp = f"{run.at(point.seconds * 70):%Y-%m-%d %H:%M:%S},417\tljs_base\tINFO\t"
        log.line(f"{stamp}Train Epoch: {point.idx // 10 + 1} [{point.idx % 10 * 10}%]")
        log.line(f"{stamp}{[2.41, 2.15, 5.1, point.loss, 1.9, 2.0, point.idx * 200, 0.0002]}")
        if point.idx % 10 == 9:
            log.line(f"{stamp}====> Epoch: {point.idx // 10 + 1}")
