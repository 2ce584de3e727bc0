"""Trainers of image models."""
# ruff: noqa: E501  (lines of logs are as long as the programs write them)

import json

from ..bars import clock, tqdm_bar
from ..simulation import Log, Registry, Run

TRAINERS = Registry()


@TRAINERS.add(
    "mae",
    "facebookresearch/mae util/misc.py MetricLogger.log_every, engine_pretrain.py",
    '"Epoch: [3]  [ 20/390]  eta: 0:02:31  lr: 0.000012  loss: 0.9913 (1.0121)  time: 0.41  data: 0.0002  max mem: 6811"',
)
def mae(run: Run, log: Log) -> None:
    log.lines(
        "| distributed init (rank 0): env://, gpu 0",
        "job dir: /workspace/mae",
        "Namespace(batch_size=64,",
        "epochs=20,",
        "mask_ratio=0.75,",
        "norm_pix_loss=True,",
        "weight_decay=0.05,",
        "lr=None,",
        "blr=0.00015)",
        "base lr: 1.50e-04",
        "actual lr: 6.00e-04",
        "accumulate grad iterations: 1",
        "effective batch size: 1024",
        "Start training for 20 epochs",
    )
    epochs, prints, per_epoch, every = 20, 20, 390, 20
    seen: list[float] = []
    for point in run.points(epochs * prints, 1.05, 0.42, 0.01):
        epoch, inside = divmod(point.idx, prints)
        seen = [point.loss] if inside == 0 else [*seen, point.loss]
        step = min(inside * every, per_epoch - 1)
        mean = sum(seen) / len(seen)
        log.line(
            f"Epoch: [{epoch}]  [{step:3d}/{per_epoch}]  eta: {clock((per_epoch - step) * 0.4)}  "
            f"lr: {6e-4 * point.lr_share:.6f}  loss: {point.loss:.4f} ({mean:.4f})  "
            f"time: {0.41 * point.pace:.4f}  data: 0.0002  max mem: 6811"
        )
        log.steps = (epoch * per_epoch + step, epoch * per_epoch + step + 1, step)
        log.losses = (point.loss,)
        if inside == prints - 1:
            log.line(f"Epoch: [{epoch}] Total time: 0:02:40 (0.4111 s / it)")
            log.line(f"Averaged stats: lr: {6e-4 * point.lr_share:.6f}  loss: {point.loss:.4f} ({mean:.4f})")
    if run.finished:
        log.line("Training time 0:53:31")


@TRAINERS.add(
    "dinov2",
    "facebookresearch/dinov2 dinov2/logging/helpers.py, dinov2/logging/__init__.py, dinov2/train/train.py",
    '"I20230420 12:00:01 4242 dinov2 helpers.py:102] Training  [  10/1250]  eta: ...  total_loss: 11.9 (12.1)  dino_local_crops_loss: ..."',
)
def dinov2(run: Run, log: Log) -> None:
    head = "4242 dinov2"
    log.line(f"I{run.began:%Y%m%d %H:%M:%S} {head} config.py:60] batch_size_per_gpu: 32")
    log.line(f"I{run.began:%Y%m%d %H:%M:%S} {head} train.py:211] Starting training from iteration 0")
    total, every = 3000, 10
    mean = 0.0
    for point in run.points(total // every, 12.4, 8.1, 0.01):
        step = point.idx * every
        mean += (point.loss - mean) / (point.idx + 1)
        lr = 2e-3 * point.lr_share
        log.line(
            f"I{run.at(point.seconds * 4):%Y%m%d %H:%M:%S} {head} helpers.py:102] Training  [{step:4d}/{total}]  "
            f"eta: {clock((total - step) * 0.4)}  lr: {lr:.4f} ({lr / 2:.4f})  wd: 0.0412 (0.0405)  mom: 0.9923 (0.9921)  "
            f"last_layer_lr: {lr:.4f} ({lr / 2:.4f})  current_batch_size: 1024.0000 (1024.0000)  "
            f"total_loss: {point.loss:.4f} ({mean:.4f})  dino_local_crops_loss: {point.loss * 0.62:.4f} ({mean * 0.62:.4f})  "
            f"dino_global_crops_loss: {point.loss * 0.15:.4f} ({mean * 0.15:.4f})  koleo_loss: -0.2310 (-0.1988)  "
            f"ibot_loss: {point.loss * 0.2:.4f} ({mean * 0.2:.4f})  time: {0.402 * point.pace:.6f}  data: 0.000351  max mem: 21873"
        )
        log.steps, log.losses = (step,), (point.loss,)
    if run.finished:
        log.line(
            f"I{run.at(1300):%Y%m%d %H:%M:%S} {head} helpers.py:130] Training Total time: 0:20:12 (0.404112 s / it)"
        )


@TRAINERS.add(
    "timm-csv",
    "huggingface/pytorch-image-models timm/utils/summary.py update_summary",
    "summary.csv: epoch,train_loss,eval_loss,eval_top1,eval_top5,lr",
    file_name="summary.csv",
    errors=None,
)
def timm_csv(run: Run, log: Log) -> None:
    log.line("epoch,train_loss,eval_loss,eval_top1,eval_top5,lr")
    for point in run.points(90, 6.9, 2.4, 0.008):
        top1 = 100 * point.accuracy
        log.line(
            f"{point.idx},{point.loss},{point.valid_loss * 0.8},{top1:.4f},{min(99.9, top1 * 1.15):.4f},{1e-3 * point.lr_share}"
        )
        log.steps, log.losses = (point.idx,), (point.loss,)


@TRAINERS.add(
    "guided-diffusion",
    "openai/guided-diffusion guided_diffusion/logger.py HumanOutputFormat.writekvs, train_util.py log_step",
    '"| %s | %s |" with "%-8.3g" values, keys sorted, dashes above and below; loss, loss_q0..3, mse, step, samples, grad_norm',
)
def guided_diffusion(run: Run, log: Log) -> None:
    log.lines(
        "Logging to /tmp/openai-2026-03-02-10-15-07-123456", "creating model and diffusion...", "training..."
    )
    for point in run.points(200, 0.62, 0.031, 0.06):
        step = point.idx * 10
        rows = {"grad_norm": point.grad_norm, "loss": point.loss}
        rows |= {f"loss_q{q}": point.loss * share for q, share in enumerate((3.1, 0.5, 0.2, 0.1))}
        rows |= {"mse": point.loss * 0.98}
        rows |= {f"mse_q{q}": point.loss * 0.98 * share for q, share in enumerate((3.1, 0.5, 0.2, 0.1))}
        rows |= {"param_norm": 312.0 + point.idx / 40, "samples": (step + 1) * 128, "step": step}
        rows |= {"vb": point.loss * 0.02}
        texts = {key: f"{value:<8.3g}" for key, value in rows.items()}
        width, value_width = max(map(len, texts)), max(map(len, texts.values()))
        dashes = "-" * (width + value_width + 7)
        log.lines(
            dashes, *(f"| {key:<{width}} | {text:<{value_width}} |" for key, text in texts.items()), dashes
        )
        log.steps, log.losses, log.tolerance = (step, float(f"{step:.3g}")), (point.loss,), 0.02
        if step % 1000 == 990:
            log.lines("saving model 0...", "saving model 0.9999...")


@TRAINERS.add(
    "sd-scripts",
    "kohya-ss/sd-scripts train_network.py (progress_bar.set_postfix with avr_loss)",
    '"steps:  12%|█▏  | 120/1000 [01:10<08:31,  1.72it/s, avr_loss=0.131]"; epochs are announced between',
)
def sd_scripts(run: Run, log: Log) -> None:
    log.lines(
        "prepare optimizer, data loader etc.",
        "running training / 学習開始",
        "  num train images * repeats / 学習画像の数×繰り返し回数: 400",
        "  num batches per epoch / 1epochのバッチ数: 200",
        "  num epochs / epoch数: 10",
        "  gradient accumulation steps / 勾配を合計するステップ数 = 1",
        "  total optimization steps / 学習ステップ数: 2000",
    )
    total, per_epoch = 2000, 200
    window: list[float] = []
    for point in run.points(total // 5, 0.19, 0.11, 0.12):
        step = (point.idx + 1) * 5
        if (step - 5) % per_epoch == 0:
            log.line(f"\nepoch {1 + (step - 5) // per_epoch}/10")
        window = [*window, point.loss][-40:]
        mean = sum(window) / len(window)
        log.bar(tqdm_bar(step, total, step / 1.72, 1.72 / point.pace, "steps", f"avr_loss={mean:.3g}"))
        log.steps, log.losses, log.tolerance, log.rate = (step,), (mean,), 0.02, 1.72 / point.pace
    if run.finished:
        log.line("\nsaving checkpoint: /workspace/out/last.safetensors")
        log.line("INFO     model saved.                                      train_network.py:1729")


@TRAINERS.add(
    "gsplat",
    "nerfstudio-project/gsplat examples/simple_trainer.py",
    "bar label \"loss={:.3f}| sh degree={}| : 12%|█▏ | 840/7000 [...]\"; \"Step:  6999 {'mem': ..., 'num_GS': ...}\"",
)
def gsplat(run: Run, log: Log) -> None:
    log.lines("Scene scale: 1.1341", "Model initialized. Number of GS: 54275")
    total = 7000
    for point in run.points(total // 20, 0.31, 0.048, 0.09):
        step = (point.idx + 1) * 20
        label = f"loss={point.loss:.3f}| sh degree={min(3, step // 1000)}| "
        log.bar(tqdm_bar(step, total, step / 71.3, 71.3 / point.pace, label))
        log.steps, log.losses, log.tolerance, log.rate = (step,), (point.loss,), 0.03, 71.3 / point.pace
        if step == 6000:
            log.line("\nStep:  5999 {'mem': 1.8822174072265625, 'ellipse_time': 84.1, 'num_GS': 1293001}")
    if run.finished:
        log.line("\nPSNR: 26.412, SSIM: 0.8411, LPIPS: 0.141 Time: 0.009s/image Number of GS: 1394121")


@TRAINERS.add(
    "edm2",
    "NVlabs/edm2 training/training_loop.py (stats.jsonl)",
    '{"Loss/loss": 0.41, "Progress/kimg": 2048.000, "Timing/sec_per_kimg": 1.2, ..., "timestamp": 1.7e9}; NaN is written bare',
    file_name="stats.jsonl",
    errors=None,
)
def edm2(run: Run, log: Log) -> None:
    for point in run.points(130, 0.98, 0.39, 0.01):
        kimg = point.idx * 128.0
        values = {
            "Loss/loss": f"{point.loss:g}" if point.loss == point.loss else "NaN",
            "Loss/learning_rate": f"{0.012 * point.lr_share:g}",
            "Progress/kimg": f"{kimg:.3f}",
            "Timing/total_sec": f"{point.seconds * 160:g}",
            "Timing/sec_per_tick": f"{160.2 * point.pace:g}",
            "Timing/sec_per_kimg": f"{1.251 * point.pace:g}",
            "Resources/peak_gpu_mem_gb": "42.11",
            "timestamp": f"{run.at(point.seconds * 160).timestamp():.3f}",
        }
        log.line("{" + ", ".join(f'"{name}": {value}' for name, value in values.items()) + "}")
        log.steps, log.losses = (kimg, kimg * 1000, point.idx, point.idx + 1), (point.loss,)


@TRAINERS.add(
    "dinov2-metrics",
    "facebookresearch/dinov2 dinov2/logging/helpers.py dump_in_output_file",
    'training_metrics.json: one object a line {"iteration": 10, "iter_time": ..., "data_time": ..., "lr": ..., "total_loss": ...}',
    file_name="training_metrics.json",
    errors=None,
)
def dinov2_metrics(run: Run, log: Log) -> None:
    for point in run.points(250, 12.4, 8.1, 0.01):
        values = {"iteration": point.idx * 10, "iter_time": 0.402 * point.pace, "data_time": 0.0004}
        values |= {"lr": 2e-3 * point.lr_share, "wd": 0.0412, "mom": 0.9923, "current_batch_size": 1024.0}
        values |= {"total_loss": point.loss, "dino_local_crops_loss": point.loss * 0.62, "koleo_loss": -0.23}
        log.line(json.dumps(values))
        log.steps, log.losses = (point.idx * 10,), (point.loss,)
