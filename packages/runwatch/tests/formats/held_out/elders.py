"""Older and specialised programs: translation, speech synthesis, tables, small laboratories."""
# ruff: noqa: E501  (lines of logs are as long as the programs write them)

from ..bars import clock, tqdm_bar
from ..simulation import Log, Registry, Run

TRAINERS = Registry()


@TRAINERS.add(
    "coqui-trainer",
    "coqui-ai/Trainer trainer/logging/console_logger.py",
    '"   --> TIME: .. -- STEP: 24/160 -- GLOBAL_STEP: 825" in bold, then "     | > loss: 3.1  (3.2)" lines',
)
def coqui_trainer(run: Run, log: Log) -> None:
    bold, end = "\x1b[1m", "\x1b[0m"
    shown, batches, mean = 6, 150, 0.0
    for point in run.points(40 * shown, 4.1, 0.5, 0.02):
        epoch, inside = divmod(point.idx, shown)
        if inside == 0:
            log.line(
                f"\n\x1b[4m{bold} > EPOCH: {epoch}/40{end}\n --> /data/run-March-02-2026\n\n{bold} > TRAINING (2026-03-02 10:15:07) {end}"
            )
        step, total = (inside + 1) * 25, epoch * batches + (inside + 1) * 25
        mean = point.loss if inside == 0 else mean + (point.loss - mean) / (inside + 1)
        log.line(
            f"\n{bold}   --> TIME: {run.at(point.seconds * 20):%Y-%m-%d %H:%M:%S} -- STEP: {step}/{batches} -- GLOBAL_STEP: {total}{end}"
        )
        rows = {"decoder_loss": 0.7, "postnet_loss": 0.2, "stopnet_loss": 0.1, "loss": 1.0}
        log.lines(
            *(f"     | > {name}: {point.loss * share}  ({mean * share})" for name, share in rows.items())
        )
        log.lines(
            f"     | > current_lr: {1e-3 * point.lr_share} ",
            f"     | > step_time: {0.612 * point.pace:.4f}  (0.6108)",
            "     | > loader_time: 0.0021  (0.0034)",
            "",
        )
        log.steps, log.losses = (total, step), (point.loss,)
        if inside == shown - 1:
            log.line(
                f"\n{bold} > EVALUATION {end}\n\n  {bold}--> EVAL PERFORMANCE{end}\n     | > avg_loader_time: 0.01 (+0.00)\n     | > avg_loss:\x1b[92m {point.valid_loss} {end}(-0.01)\n"
            )
            log.losses += (point.valid_loss,)


@TRAINERS.add(
    "joeynmt",
    "joeynmt/joeynmt joeynmt/training.py",
    '"Epoch %3d, Step: %8d, Batch Loss: %12.6f, Batch Acc: %.6f, Tokens per Sec: %8.0f, Lr: %.6f"',
)
def joeynmt(run: Run, log: Log) -> None:
    head = "- INFO - joeynmt.training -"
    for point in run.points(200, 6.1, 1.6, 0.03):
        step, now = (
            (point.idx + 1) * 100,
            f"{run.at(point.seconds * 15):%Y-%m-%d %H:%M:%S},{int(point.draw * 1000):03d}",
        )
        log.line(
            f"{now} {head} Epoch {1 + step // 2500:3d}, Step: {step:8d}, Batch Loss: {point.loss:12.6f}, Batch Acc: {point.accuracy:.6f}, Tokens per Sec: {18231 / point.pace:8.0f}, Lr: {3e-4 * point.lr_share:.6f}"
        )
        log.steps, log.losses, log.rate = (step,), (point.loss,), 18231 / point.pace
        if step % 5000 == 0:
            log.line(
                f"{now} - INFO - joeynmt.prediction - Evaluation result (greedy): bleu:  21.31, loss: {point.valid_loss:6.2f}, ppl:   9.10, acc:   0.51, generation: 12.3100[sec], evaluation: 0.0000[sec]"
            )
            log.losses += (point.valid_loss,)


@TRAINERS.add(
    "levanter",
    "stanford-crfm/levanter src/levanter/callbacks/_metrics.py pbar_logger",
    '"train:  12%|█▏ | 120/1000 [01:10<08:31,  1.72it/s, loss=3.21]" and an eval bar with a loss of its own between',
    errors="jax",
)
def levanter(run: Run, log: Log) -> None:
    total = 2000
    for point in run.points(total // 5, 10.8, 2.9, 0.015):
        step = (point.idx + 1) * 5
        log.bar(tqdm_bar(step, total, step / 1.7, 1.72 / point.pace, "train", f"loss={point.loss:.3g}"))
        log.steps, log.losses, log.tolerance, log.rate = (step,), (point.loss,), 0.02, 1.72 / point.pace
        if step % 500 == 0:
            for done in (10, 20):
                log.bar(tqdm_bar(done, 20, done / 9, 9.1, "eval", f"loss={point.valid_loss:.3g}"))
            log.line(
                f"\n{run.at(point.seconds):%Y-%m-%dT%H:%M:%S} - 0 - levanter.eval - eval.py:160 - INFO :: eval loss: {point.valid_loss:.3f}"
            )
            log.losses, log.steps = (*log.losses, point.valid_loss), (*log.steps, 20)


@TRAINERS.add(
    "marian",
    "marian-nmt/marian-dev src/training/scheduler.h",
    '"[2026-03-02 10:15:07] Ep. 1 : Up. 500 : Sen. 32,000 : Cost 7.12345678 * 812,345 @ 1,234 after 812,345 : Time 12.31s : 65231.10 words/s : gNorm 1.2 : L.r. 3e-4"',
    errors="plain",
)
def marian(run: Run, log: Log) -> None:
    log.lines(
        "[2026-03-02 10:15:01] [marian] Running on gpu01 as process 4123",
        "[2026-03-02 10:15:01] [config] cost-type: ce-mean-words",
        "[2026-03-02 10:15:01] [config] learn-rate: 0.0003",
    )
    for point in run.points(200, 9.6, 2.1, 0.01):
        step, now = (point.idx + 1) * 500, f"[{run.at(point.seconds * 60):%Y-%m-%d %H:%M:%S}]"
        log.line(
            f"{now} Ep. {1 + step // 20000} : Up. {step} : Sen. {step % 20000 * 64:,} : Cost {point.loss:.8f} : Time {60.1 * point.pace:.2f}s : {65231.1 / point.pace:.2f} words/s : gNorm {point.grad_norm:.4f} : L.r. {3e-4 * point.lr_share:.4e}"
        )
        log.steps, log.losses, log.rate = (step,), (point.loss,), 65231.1 / point.pace
        if step % 10000 == 0:
            log.line(
                f"{now} [valid] Ep. {1 + step // 20000} : Up. {step} : ce-mean-words : {point.valid_loss:.6g} : new best"
            )
            log.line(f"{now} Saving model weights and runtime parameters to model/model.npz")
    if run.finished:
        log.line("[2026-03-02 20:15:01] Training finished")


@TRAINERS.add(
    "mlx-lora",
    "ml-explore/mlx-examples lora/lora.py",
    '"Iter {}: Train loss {:.3f}, It/sec {:.3f}, Tokens/sec {:.3f}" and "Iter {}: Val loss {:.3f}, Val took {:.3f}s"',
    errors="plain",
)
def mlx_lora(run: Run, log: Log) -> None:
    log.lines(
        "Loading pretrained model",
        "Total parameters 7243.436M",
        "Trainable parameters 1.704M",
        "Loading datasets",
        "Training",
    )
    for point in run.points(150, 2.6, 0.9, 0.03):
        step = (point.idx + 1) * 10
        if point.idx % 20 == 0:
            log.line(f"Iter {max(1, step - 10)}: Val loss {point.valid_loss:.3f}, Val took 21.311s")
        log.line(
            f"Iter {step}: Train loss {point.loss:.3f}, It/sec {0.531 / point.pace:.3f}, Tokens/sec {212.1 / point.pace:.3f}"
        )
        log.steps, log.losses = (step,), (point.loss,)
        if step % 500 == 0:
            log.line(f"Iter {step}: Saved adapter weights to adapters.npz.")


@TRAINERS.add(
    "nanotron",
    "huggingface/nanotron src/nanotron/trainer.py, src/nanotron/logging/base.py human_format",
    '"iteration: 10 / 1500 | consumed_tokens: 41.9M | time_per_iteration_ms: 1.2K | tokens_per_sec: 3.41M | ... | lm_loss: 9.81 | lr: 3e-05 | model_tflops_per_gpu: 401 | eta: 0:21:10"',
)
def nanotron(run: Run, log: Log) -> None:
    def human(value: float) -> str:
        if abs(value) < 1 or value != value:
            return f"{value:.3g}"
        size = 0
        while abs(value) >= 1000:
            size, value = size + 1, value / 1000
        return f"{value:.3g}" + ["", "K", "M", "B", "T"][size]

    for point in run.points(300, 11.2, 2.8, 0.01):
        step = point.idx * 5 + 5
        log.line(
            f"{run.at(point.seconds * 6):%m/%d/%Y %H:%M:%S} [INFO|DP=0|ip-26-0-161-103]: iteration: {step} / 1500 | consumed_tokens: {human(step * 4194304.0)} | time_per_iteration_ms: {human(1231.0 * point.pace)} | "
            f"tokens_per_sec: {human(3407000.0 / point.pace)} | tokens_per_sec_per_gpu: {human(53200.0 / point.pace)} | global_batch_size: 4.19M | lm_loss: {human(point.loss)} | lr: {human(3e-4 * point.lr_share)} | "
            f"model_tflops_per_gpu: {human(401.0 / point.pace)} | eta: {clock((1500 - step) * 1.2)} | grad_norm: {human(point.grad_norm)}"
        )
        log.steps, log.losses, log.tolerance, log.rate = (step,), (point.loss,), 0.02, 3407000.0 / point.pace


@TRAINERS.add(
    "sklearn-boosting",
    "scikit-learn/scikit-learn sklearn/ensemble/_gb.py VerboseReporter",
    'table "      Iter       Train Loss   Remaining Time "',
    errors="plain",
)
def sklearn_boosting(run: Run, log: Log) -> None:
    log.line(f"{'Iter':>10s} {'Train Loss':>16s} {'Remaining Time':>16s} ")
    for point in run.points(100, 1.3, 0.2, 0.002):
        log.line(f"{point.idx + 1:>10d} {point.loss:>16.4f} {f'{(100 - point.idx) * 0.31:.2f}s':>16s} ")
        log.steps, log.losses = (point.idx + 1,), (point.loss,)


@TRAINERS.add(
    "sklearn-sgd",
    "scikit-learn/scikit-learn sklearn/linear_model/_sgd_fast.pyx.tp",
    '"-- Epoch 1", "Norm: 1.21, NNZs: 64, Bias: -0.31, T: 1797, Avg. loss: 0.91, Objective: 0.92", "Total training time: 0.01 seconds."',
    errors="plain",
)
def sklearn_sgd(run: Run, log: Log) -> None:
    for point in run.points(80, 3.1, 0.2, 0.02):
        log.line(f"-- Epoch {point.idx + 1}")
        log.line(
            f"Norm: {12 + point.draw:.2f}, NNZs: 64, Bias: {-0.3 * point.draw:.6f}, T: {(point.idx + 1) * 1797}, Avg. loss: {point.loss:f}, Objective: {point.loss * 1.01:f}"
        )
        log.line(f"Total training time: {0.01 * point.seconds:.2f} seconds.")
        log.steps, log.losses, log.tolerance = (point.idx + 1, (point.idx + 1) * 1797), (point.loss,), 0.02


@TRAINERS.add(
    "spinningup",
    "openai/spinningup spinup/utils/logx.py dump_tabular, spinup/algos/pytorch/ppo/ppo.py",
    '"|           LossV |            12.3 |" rows between dashes: Epoch, AverageEpRet, EpLen, TotalEnvInteracts, LossPi, LossV, DeltaLossPi, KL',
    may_warn=("M104",),
)
def spinningup(run: Run, log: Log) -> None:
    for point in run.points(120, 400.0, 30.0, 0.06):
        rows = {
            "Epoch": point.idx,
            "AverageEpRet": 20 + 400 * point.accuracy,
            "StdEpRet": 31.0,
            "EpLen": 200.0,
            "AverageVVals": 21.0,
        }
        rows |= {
            "TotalEnvInteracts": (point.idx + 1) * 4000,
            "LossPi": 0.02 * (point.draw - 0.5) + 0.0 * point.loss,
            "LossV": point.loss,
            "DeltaLossPi": -0.011,
            "DeltaLossV": -2.1,
        }
        rows |= {"Entropy": 0.61, "KL": 0.008, "ClipFrac": 0.05, "StopIter": 79.0, "Time": point.seconds * 9}
        log.lines(
            "-" * 40, *(f"| {name:>17s} | {f'{value:8.3g}':>15s} |" for name, value in rows.items()), "-" * 40
        )
        log.steps, log.losses, log.tolerance = (
            (point.idx, (point.idx + 1) * 4000),
            (point.loss, rows["LossPi"]),
            0.02,
        )


@TRAINERS.add(
    "tabnet",
    "dreamquark-ai/tabnet pytorch_tabnet/callbacks.py History.on_epoch_end",
    '"epoch 0  | loss: 0.6512  | valid_auc: 0.7123  |  0:00:01s"',
)
def tabnet(run: Run, log: Log) -> None:
    for point in run.points(100, 0.69, 0.21, 0.02):
        log.line(
            f"epoch {point.idx:<3}| loss: {round(point.loss, 5):<8}| train_auc: {round(point.accuracy, 5):<8}| valid_auc: {round(point.accuracy - 0.02, 5):<8}|  {clock(3600 + point.seconds) + 's':<6}"
        )
        log.steps, log.losses = (point.idx,), (point.loss,)
    if run.scenario == "healthy":
        log.line("\nEarly stopping occurred at epoch 99 with best_epoch = 79 and best_valid_auc = 0.84121")


@TRAINERS.add(
    "torchvision",
    "pytorch/vision references/classification/train.py, references/classification/utils.py",
    '"Epoch: [0]  [  0/1251]  eta: 0:41:02  lr: 0.5  img/s: 812.1  loss: 6.9 (6.9)  acc1: 0.0 (0.0)  acc5: ..  time: ..  data: ..  max mem: 8123"',
)
def torchvision(run: Run, log: Log) -> None:
    log.line(
        "Namespace(data_path='/data', model='resnet50', device='cuda', batch_size=32, epochs=12, opt='sgd', lr=0.1, momentum=0.9, weight_decay=0.0001)"
    )
    shown, batches, mean = 20, 1251, 0.0
    for point in run.points(12 * shown, 6.9, 1.9, 0.02):
        epoch, inside = divmod(point.idx, shown)
        step = min(inside * 66, batches - 1)
        mean = point.loss if inside == 0 else mean + (point.loss - mean) / (inside + 1)
        acc = 100 * point.accuracy
        log.line(
            f"Epoch: [{epoch}]  [{step:4d}/{batches}]  eta: {clock((batches - step) * 0.3)}  lr: {0.1 * point.lr_share}  img/s: {812.1 / point.pace}  loss: {point.loss:.4f} ({mean:.4f})  "
            f"acc1: {acc:.4f} ({acc:.4f})  acc5: {acc:.4f} ({acc:.4f})  time: {0.31 * point.pace:.4f}  data: 0.0002  max mem: 8123"
        )
        log.steps, log.losses, log.rate = (
            (epoch * batches + step, epoch * batches + step + 1, step),
            (point.loss,),
            812.1 / point.pace,
        )
        if inside == shown - 1:
            log.line(f"Epoch: [{epoch}] Total time: 0:06:31")
            log.line(
                f"Test:   [  0/196]  eta: 0:02:10  loss: {point.valid_loss:.4f} ({point.valid_loss:.4f})  acc1: {acc:.4f} ({acc:.4f})  time: 0.6641  data: 0.4121  max mem: 8123"
            )
            log.line(f"Test:  Acc@1 {acc:.3f} Acc@5 {acc:.3f}")
            log.losses += (point.valid_loss,)
            log.steps += (0, (epoch + 1) * batches)
    if run.finished:
        log.line("Training time 1:19:31")
