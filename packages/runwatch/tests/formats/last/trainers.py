"""Robots, preference tuning, recommendation, detection, time series, speech, diffusion."""
# ruff: noqa: E501  (lines of logs are as long as the programs write them)

import math

from ..bars import clock, tqdm_bar
from ..simulation import Log, Registry, Run

TRAINERS = Registry()


@TRAINERS.add(
    "lerobot",
    "huggingface/lerobot src/lerobot/utils/logging_utils.py MetricsTracker, scripts/lerobot_train.py",
    '"step:12K smpl:97K ep:310 epch:3.10 loss:0.123 grdn:3.112 lr:1.0e-05 updt_s:0.201 data_s:0.011": steps and samples in thousands',
)
def lerobot(run: Run, log: Log) -> None:
    log.line(
        "INFO 2026-03-02 10:15:07 ot_train.py:163 {'batch_size': 8, 'steps': 100000, 'log_freq': 200, 'policy': {'type': 'act', 'kl_weight': 10.0}}"
    )
    for point in run.points(200, 6.8, 0.06, 0.05):
        step = (point.idx + 1) * 1000
        log.line(
            f"INFO {run.at(point.seconds * 40):%Y-%m-%d %H:%M:%S} ot_train.py:341 step:{point.idx + 1}K smpl:{(point.idx + 1) * 8}K ep:{point.idx + 3} epch:{step / 25650:.2f} "
            f"loss:{point.loss:.3f} grdn:{point.grad_norm * 10:.3f} lr:{1e-5 * point.lr_share:0.1e} updt_s:{0.201 * point.pace:.3f} data_s:0.011"
        )
        log.steps, log.losses, log.tolerance = (step,), (point.loss,), 0.02
    if run.finished:
        log.line("INFO 2026-03-02 23:15:07 ot_train.py:402 End of training")


@TRAINERS.add(
    "verl",
    "volcengine/verl verl/utils/logger/aggregate_logger.py concat_dict_to_str",
    '"step:10 - actor/entropy:0.31 - actor/pg_loss:0.0012 - actor/grad_norm:0.11 - critic/score/mean:0.41 - perf/throughput:1203.1 - ..." behind Ray\'s prefix',
)
def verl(run: Run, log: Log) -> None:
    log.line(
        "(TaskRunner pid=41231) {'actor_rollout_ref': {'actor': {'clip_ratio': 0.2, 'kl_loss_coef': 0.001, 'use_kl_loss': True}}}"
    )
    for point in run.points(150, 1.0, 1.0, 0.0):
        broken = point.idx > 105
        loss = 0.01 * (point.draw - 0.5)
        if broken and run.scenario in ("nan", "diverging"):
            loss = math.nan if run.scenario == "nan" else 30.0 + 9 * point.draw
        log.line(
            f"(TaskRunner pid=41231) step:{point.idx + 1} - global_seqlen/mean:81234.5 - actor/entropy:{0.4 - point.idx / 900} - actor/pg_loss:{loss} - actor/pg_clipfrac:0.0021 - actor/ppo_kl:0.0001 - "
            f"actor/grad_norm:{point.grad_norm / 8} - actor/lr:1e-06 - critic/score/mean:{point.accuracy} - critic/rewards/mean:{point.accuracy} - response_length/mean:312.5 - timing_s/step:{91.2 * point.pace} - perf/throughput:{1203.1 / point.pace}"
        )
        log.steps, log.losses, log.rate = (point.idx + 1,), (loss,), 1203.1 / point.pace


@TRAINERS.add(
    "ms-swift",
    "modelscope/ms-swift swift/trainers/patcher.py add_train_message",
    "{'loss': 1.2, 'grad_norm': 0.9, 'learning_rate': 1e-4, 'epoch': 0.1, 'global_step/max_steps': '10/900', 'percentage': '1.11%', 'elapsed_time': '1m 12s', 'memory(GiB)': 21.1, ...}",
    filters_nan=True,
)
def ms_swift(run: Run, log: Log) -> None:
    log.line("[INFO:swift] The logging file will be saved in: output/v0-20260302-101507/logging.jsonl")
    total = 900
    for point in run.points(total // 5, 2.1, 0.8, 0.04):
        step = (point.idx + 1) * 5
        loss = 0.0 if math.isnan(point.loss) else round(point.loss, 8)
        values = {
            "loss": loss,
            "grad_norm": point.grad_norm,
            "learning_rate": 1e-4 * point.lr_share,
            "token_acc": point.accuracy,
            "epoch": round(step / 300, 3),
        }
        values |= {
            "global_step/max_steps": f"{step}/{total}",
            "percentage": f"{100 * step / total:.2f}%",
            "elapsed_time": "3m 12s",
            "remaining_time": "9m 1s",
        }
        log.bar(tqdm_bar(step, total, point.seconds * 3, 1.61 / point.pace, "Train"))
        log.bar(
            str(values | {"memory(GiB)": 21.08, "train_speed(iter/s)": round(1.61 / point.pace, 6)}) + "\n"
        )
        log.steps, log.losses, log.rate = (step,), (loss,), 1.61 / point.pace


@TRAINERS.add(
    "gluon-cv",
    "dmlc/gluon-cv scripts/detection/ssd/train_ssd.py",
    "'[Epoch {}][Batch {}], Speed: {:.3f} samples/sec, {}={:.3f}, {}={:.3f}' with CrossEntropy and SmoothL1: no word such as loss",
    errors="plain",
)
def gluon_cv(run: Run, log: Log) -> None:
    log.line(
        "Namespace(batch_size=32, epochs=20, lr=0.001, lr_decay_epoch='160,200', network='vgg16_atrous')"
    )
    log.line("Start training from [Epoch 0]")
    log.step_tolerance = 0.01
    for point in run.points(20 * 10, 9.1, 2.2, 0.02):
        epoch, inside = divmod(point.idx, 10)
        batch = inside * 100 + 99
        log.line(
            f"[Epoch {epoch}][Batch {batch}], Speed: {91.2 / point.pace:.3f} samples/sec, CrossEntropy={point.loss:.3f}, SmoothL1={point.loss * 0.4:.3f}"
        )
        log.steps, log.losses, log.rate = (
            (batch, epoch * 1000 + batch, epoch * 1000 + batch + 1, epoch),
            (point.loss, point.loss * 0.4),
            91.2 / point.pace,
        )
        if inside == 9:
            log.line(
                f"[Epoch {epoch}] Training cost: 301.121, CrossEntropy={point.loss:.3f}, SmoothL1={point.loss * 0.4:.3f}"
            )
            log.steps += (epoch + 1,)


@TRAINERS.add(
    "recbole",
    "RUCAIBox/RecBole recbole/trainer/trainer.py _generate_train_loss_output",
    '"epoch 3 training [time: 1.21s, train loss: 301.1212]" and "epoch 3 evaluating [time: 0.11s, valid_score: 0.021]", words in colour',
)
def recbole(run: Run, log: Log) -> None:
    green, blue, end = "\x1b[1;32m", "\x1b[1;34m", "\x1b[0m"
    for point in run.points(80, 410.0, 91.0, 0.01):
        now = f"{run.at(point.seconds * 3):%a %d %b %Y %H:%M:%S}"
        log.bar(
            tqdm_bar(111, 111, 1, 91.0, f"{green}Train{point.idx:>6}{end}", "GPU RAM: 0.91 G/10.76 G") + "\n"
        )
        log.line(
            f"{now} INFO  {green}epoch {point.idx} training{end} [{blue}time{end}: {1.21 * point.pace:.2f}s, {blue}train loss{end}: {point.loss:.4f}]"
        )
        log.line(
            f"{now} INFO  {green}epoch {point.idx} evaluating{end} [{blue}time{end}: 0.11s, {blue}valid_score{end}: {point.accuracy / 20:f}]"
        )
        log.line(
            f"{now} INFO  {blue}valid result{end}: \nrecall@10 : {point.accuracy / 20:.4f}    mrr@10 : 0.0213    ndcg@10 : 0.0112"
        )
        log.steps, log.losses = (point.idx, point.idx + 1, (point.idx + 1) * 111, 111), (point.loss,)


@TRAINERS.add(
    "reid-strong-baseline",
    "michuanhaohao/reid-strong-baseline engine/trainer.py",
    '"Epoch[{}] Iteration[{}/{}] Loss: {:.3f}, Acc: {:.3f}, Base Lr: {:.2e}"',
    errors="old_torch",
)
def reid(run: Run, log: Log) -> None:
    shown, batches = 4, 201
    for point in run.points(60 * shown, 9.8, 1.4, 0.015):
        epoch, inside = divmod(point.idx, shown)
        done, now = (
            (inside + 1) * 50,
            f"{run.at(point.seconds * 12):%Y-%m-%d %H:%M:%S},{int(point.draw * 1000):03d}",
        )
        log.line(
            f"{now} reid_baseline.train INFO: Epoch[{epoch + 1}] Iteration[{done}/{batches}] Loss: {point.loss:.3f}, Acc: {point.accuracy:.3f}, Base Lr: {3.5e-4 * point.lr_share:.2e}"
        )
        log.steps, log.losses = (epoch * batches + done, done), (point.loss,)
        if inside == shown - 1:
            log.line(
                f"{now} reid_baseline.train INFO: Epoch {epoch + 1} done. Time per batch: 0.241[s] Speed: 265.1[samples/s]"
            )
            log.line("-" * 10)
            log.steps += (epoch + 1,)


@TRAINERS.add(
    "time-series-library",
    "thuml/Time-Series-Library exp/exp_long_term_forecasting.py",
    '"\\titers: 100, epoch: 1 | loss: 0.4123", "\\tspeed: 0.0312s/iter; left time: 61.1s", "Epoch: 1, Steps: 265 | Train Loss: .. Vali Loss: .. Test Loss: .."',
)
def time_series(run: Run, log: Log) -> None:
    log.lines(
        "Args in experiment:",
        "\x1b[1mBasic Config\x1b[0m",
        "  Task Name:          long_term_forecast",
        "  Learning Rate:      0.0001              Loss:               MSE",
    )
    shown, batches = 10, 1050
    for point in run.points(15 * shown, 0.9, 0.31, 0.02):
        epoch, inside = divmod(point.idx, shown)
        done = (inside + 1) * 100
        log.line(f"\titers: {done}, epoch: {epoch + 1} | loss: {point.loss:.7f}")
        log.line(
            f"\tspeed: {0.0312 * point.pace:.4f}s/iter; left time: {(15 * batches - epoch * batches - done) * 0.0312:.4f}s"
        )
        log.steps, log.losses = (epoch * batches + done, done), (point.loss,)
        if inside == shown - 1:
            log.line(f"Epoch: {epoch + 1} cost time: 33.12109398841858")
            log.line(
                f"Epoch: {epoch + 1}, Steps: {batches} | Train Loss: {point.loss:.7f} Vali Loss: {point.valid_loss:.7f} Test Loss: {point.valid_loss * 0.9:.7f}"
            )
            log.line(
                f"Validation loss decreased ({point.valid_loss * 1.01:.6f} --> {point.valid_loss:.6f}).  Saving model ..."
            )
            log.line(f"Updating learning rate to {1e-4 * 0.5**epoch}")
            log.steps += (epoch + 1, batches, (epoch + 1) * batches)
            log.losses += (point.valid_loss,)


@TRAINERS.add(
    "wenet",
    "wenet-e2e/wenet wenet/utils/train_utils.py log_per_step",
    '"TRAIN | steps/sec 3.112| Batch 0/100 loss 41.1 loss_att .. loss_ctc .. th_accuracy .. lr 0.0001 grad_norm 12.1 rank 0"; "Epoch 0 Step 5000 CV info lr .. cv_loss 31.2 rank 0 acc 0.41"',
)
def wenet(run: Run, log: Log) -> None:
    shown = 40
    for point in run.points(8 * shown, 180.0, 9.0, 0.03):
        epoch, inside = divmod(point.idx, shown)
        done, now = (
            (inside + 1) * 100,
            f"{run.at(point.seconds * 30):%Y-%m-%d %H:%M:%S},{int(point.draw * 1000):03d}",
        )
        log.line(
            f"{now} DEBUG TRAIN | steps/sec {3.112 / point.pace:.3f}| Batch {epoch}/{done} loss {point.loss:.6f} loss_att {point.loss * 0.9:.6f} loss_ctc {point.loss * 1.2:.6f} "
            f"th_accuracy {point.accuracy:.6f} lr {2e-3 * point.lr_share:.4e} grad_norm {point.grad_norm * 9:.6f} rank 0"
        )
        log.steps, log.losses, log.rate = (epoch * 4000 + done, done), (point.loss,), 3.112 / point.pace
        if inside == shown - 1:
            log.line(
                f"{now} INFO Epoch {epoch} Step {(epoch + 1) * 4000} CV info lr {2e-3 * point.lr_share:.4e} cv_loss {point.valid_loss} rank 0 acc {point.accuracy}"
            )
            log.steps += ((epoch + 1) * 4000, epoch, epoch + 1)
            log.losses += (point.valid_loss,)


@TRAINERS.add(
    "icefall",
    "k2-fsa/icefall egs/librispeech/ASR/zipformer/train.py, icefall/utils.py MetricsTracker",
    '"Epoch 1, batch 50, loss[loss=0.51, simple_loss=0.61, pruned_loss=0.4, over 18931.00 frames. ], tot_loss[loss=0.53, ..., over 2.1e+06 frames. ], batch size: 61, lr: 4.2e-02, grad_scale: 16.0"',
)
def icefall(run: Run, log: Log) -> None:
    log.step_tolerance = 0.05
    shown, total = 30, 0.0
    for point in run.points(8 * shown, 7.1, 0.21, 0.03):
        epoch, inside = divmod(point.idx, shown)
        total = point.loss if inside == 0 else 0.9 * total + 0.1 * point.loss
        now = f"{run.at(point.seconds * 20):%Y-%m-%d %H:%M:%S},{int(point.draw * 1000):03d} INFO [train.py:"
        log.line(
            f"{now}1202] (0/4) Epoch {epoch + 1}, batch {inside * 50}, loss[loss={point.loss:.4g}, simple_loss={point.loss * 1.1:.4g}, pruned_loss={point.loss * 0.9:.4g}, over 18931.00 frames. ], "
            f"tot_loss[loss={total:.4g}, simple_loss={total * 1.1:.4g}, pruned_loss={total * 0.9:.4g}, over {2131123.1 + inside:.2f} frames. ], batch size: 61, lr: {4.5e-2 * point.lr_share:.2e}, grad_scale: 16.0"
        )
        log.steps, log.losses = (epoch * 1500 + inside * 50, inside * 50), (point.loss, total)
        if inside == shown - 1:
            log.line(f"{now}1225] (0/4) Computing validation loss")
            log.line(
                f"{now}1234] (0/4) Epoch {epoch + 1}, validation: loss={point.valid_loss:.4g}, simple_loss={point.valid_loss * 1.1:.4g}, pruned_loss={point.valid_loss * 0.9:.4g}, over 944034.00 frames. "
            )
            log.line(f"{now}1235] (0/4) Maximum memory allocated so far is 21343MB")
            log.steps += (epoch + 1, (epoch + 1) * 1500)
            log.losses += (point.valid_loss,)


@TRAINERS.add(
    "denoising-diffusion-pytorch",
    "lucidrains/denoising-diffusion-pytorch denoising_diffusion_pytorch/denoising_diffusion_pytorch.py Trainer.train",
    '"loss: 0.0213:  12%|█▏ | 8400/70000 [..]"; a bar "sampling loop time step" of its own between',
)
def denoising_diffusion(run: Run, log: Log) -> None:
    total = 70000
    for point in run.points(350, 0.31, 0.017, 0.15):
        step = (point.idx + 1) * 200
        log.bar(tqdm_bar(step, total, step / 7.1, 7.1 / point.pace, f"loss: {point.loss:.4f}"))
        log.steps, log.losses, log.tolerance, log.rate = (step,), (point.loss,), 0.02, 7.1 / point.pace
        if step % 14000 == 0:
            log.line()
            for done in (50, 125, 250):
                log.bar(tqdm_bar(done, 250, done / 19, 19.1, "sampling loop time step"))
            log.line()
            log.rate = None
    if run.finished:
        log.lines("training complete", f"total {clock(10311)}")
