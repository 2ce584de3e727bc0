"""Trainers of image and 3D models."""
# ruff: noqa: E501  (lines of logs are as long as the programs write them)

from ..bars import clock, tqdm_bar
from ..simulation import Log, Registry, Run

TRAINERS = Registry()


@TRAINERS.add(
    "timm-train",
    "huggingface/pytorch-image-models train.py train_one_epoch",
    '"Train: {} [{:>4d}/{} ({:>3.0f}%)]  Loss: {:#.3g} ({:#.3g})  Time: {:.3f}s, {:>7.2f}/s  (...)  LR: {:.3e}  Data: {:.3f} ({:.3f})"',
)
def timm_train(run: Run, log: Log) -> None:
    log.lines(
        "Training with a single process on 1 device (cuda:0).", "Model resnet50 created, param count:25557032"
    )
    log.lines(
        "Data processing configuration for current model + dataset:",
        "\tinput_size: (3, 224, 224)",
        "\tmean: (0.485, 0.456, 0.406)",
    )
    shown, updates = 13, 625
    mean = 0.0
    for point in run.points(20 * shown, 6.9, 2.5, 0.02):
        epoch, inside = divmod(point.idx, shown)
        update = min(inside * 50, updates - 1)
        mean = point.loss if inside == 0 else mean + (point.loss - mean) / (inside + 1)
        log.line(
            f"Train: {epoch} [{update:>4d}/{updates} ({100 * (update + 1) / updates:>3.0f}%)]  Loss: {point.loss:#.3g} ({mean:#.3g})  "
            f"Time: {0.281 * point.pace:.3f}s, {911.2 / point.pace:>7.2f}/s  (0.284s,  901.41/s)  LR: {0.1 * point.lr_share:.3e}  Data: 0.011 (0.014)"
        )
        log.steps, log.losses, log.tolerance = (
            (epoch * updates + update, epoch * updates + update + 1, update),
            (point.loss, mean),
            0.02,
        )
        if inside == shown - 1:
            acc = 100 * point.accuracy
            log.line(
                f"Test: [ 195/195]  Time: 0.112 (0.141)  Loss: {point.valid_loss:>7.3f} ({point.valid_loss:>6.3f})  "
                f"Acc@1: {acc:>7.3f} ({acc:>7.3f})  Acc@5: {acc:>7.3f} ({acc:>7.3f})"
            )
            log.line("Current checkpoints:")
            log.line(f" ('./output/train/20260302-101507-resnet50-224/checkpoint-{epoch}.pth.tar', {acc})")
            log.losses += (point.valid_loss,)
    if run.finished:
        log.line("*** Best metric: 71.342 (epoch 19)")


@TRAINERS.add(
    "ultralytics-bar",
    "ultralytics/ultralytics ultralytics/engine/trainer.py, utils/tqdm.py, models/yolo/detect/train.py progress_string",
    'header "Epoch GPU_mem box_loss cls_loss dfl_loss Instances Size", then "\\r\\033[K 1/100 2.1G 1.2 2.3 1.1 31 640: 42% ━━━━━─────── 52/125 9.1it/s 5.7s<8.0s"',
)
def ultralytics_bar(run: Run, log: Log) -> None:
    log.line("Ultralytics 8.3.203 🚀 Python-3.11.9 torch-2.8.0 CUDA:0 (NVIDIA A100-SXM4-40GB, 40441MiB)")
    log.line(
        "\x1b[34m\x1b[1moptimizer:\x1b[0m AdamW(lr=0.002, momentum=0.9) with parameter groups 57 weight(decay=0.0), 64 weight(decay=0.0005), 63 bias(decay=0.0)"
    )
    log.lines(
        "Image sizes 640 train, 640 val", "Using 8 dataloader workers", "Starting training for 25 epochs..."
    )
    epochs, shown, batches = 25, 10, 120
    for point in run.points(epochs * shown, 3.4, 1.1, 0.015):
        epoch, inside = divmod(point.idx, shown)
        if inside == 0:
            log.line(
                "\n"
                + "".join(
                    f"{name:>11s}"
                    for name in ("Epoch", "GPU_mem", "box_loss", "cls_loss", "dfl_loss", "Instances", "Size")
                )
            )
        done = (inside + 1) * batches // shown
        box, cls, dfl = point.loss * 0.5, point.loss, point.loss * 0.6
        label = f"{f'{epoch + 1}/{epochs}':>11s}{'2.31G':>11s}" + "".join(
            f"{value:11.4g}" for value in (box, cls, dfl, 31, 640)
        )
        filled = done * 12 // batches
        log.parts.append(
            f"\r\x1b[K{label}: {100 * done / batches:.0f}% {'━' * filled}{'─' * (12 - filled)} {done}/{batches} {9.1 / point.pace:.1f}it/s {done / 9.1:.1f}s"
        )
        log.steps, log.losses = (
            (epoch * batches + done, done, epoch + 1, epoch),
            (box, cls, dfl, box + cls + dfl),
        )
        if inside == shown - 1:
            acc = point.accuracy
            log.line(
                "\n"
                + " " * 17
                + "Class     Images  Instances      Box(P          R      mAP50  mAP50-95): 100% ━━━━━━━━━━━━ 4/4 8.0it/s 0.5s"
            )
            log.line(f"{'all':>22s}{128:>11d}{929:>11d}{acc:11.3g}{acc:11.3g}{acc:11.3g}{acc:11.3g}")
    if run.finished:
        log.lines(
            "",
            "25 epochs completed in 0.096 hours.",
            "Optimizer stripped from runs/detect/train/weights/last.pt, 5.5MB",
        )
        log.line("Results saved to \x1b[1mruns/detect/train\x1b[0m")


@TRAINERS.add(
    "ultralytics-csv",
    "ultralytics/ultralytics ultralytics/engine/trainer.py save_metrics",
    "results.csv: epoch,time,train/box_loss,train/cls_loss,train/dfl_loss,metrics/precision(B),...,val/box_loss,...,lr/pg0 in %.6g",
    file_name="results.csv",
    errors=None,
)
def ultralytics_csv(run: Run, log: Log) -> None:
    log.line(
        "epoch,time,train/box_loss,train/cls_loss,train/dfl_loss,metrics/precision(B),metrics/recall(B),metrics/mAP50(B),metrics/mAP50-95(B),"
        "val/box_loss,val/cls_loss,val/dfl_loss,lr/pg0,lr/pg1,lr/pg2"
    )
    for point in run.points(100, 3.4, 1.1, 0.01):
        losses = (point.loss * 0.5, point.loss, point.loss * 0.6)
        valid = (point.valid_loss * 0.5, point.valid_loss, point.valid_loss * 0.6)
        row = [
            point.idx + 1,
            point.seconds * 14,
            *losses,
            *[point.accuracy] * 4,
            *valid,
            *[2e-3 * point.lr_share] * 3,
        ]
        log.line(",".join(f"{value:.6g}" for value in row))
        log.steps, log.losses = (point.idx + 1, point.idx), (*losses, sum(losses))


@TRAINERS.add(
    "yolov5",
    "ultralytics/yolov5 train.py, utils/loggers/__init__.py",
    'header "%11s" * 7: Epoch GPU_mem box_loss obj_loss cls_loss Instances Size; then a tqdm bar labelled "0/99 1.5G 0.11 0.03 0.02 41 640"',
)
def yolov5(run: Run, log: Log) -> None:
    log.line(
        "\x1b[34m\x1b[1mhyperparameters: \x1b[0mlr0=0.01, lrf=0.01, momentum=0.937, weight_decay=0.0005, warmup_epochs=3.0, box=0.05, cls=0.5, obj=1.0, fl_gamma=0.0"
    )
    log.lines(
        "Image sizes 640 train, 640 val", "Using 8 dataloader workers", "Starting training for 30 epochs..."
    )
    epochs, shown, batches = 30, 8, 96
    for point in run.points(epochs * shown, 0.12, 0.025, 0.015):
        epoch, inside = divmod(point.idx, shown)
        if inside == 0:
            log.line(
                "\n"
                + "".join(
                    f"{name:>11s}"
                    for name in ("Epoch", "GPU_mem", "box_loss", "obj_loss", "cls_loss", "Instances", "Size")
                )
            )
        done = (inside + 1) * batches // shown
        losses = (point.loss, point.loss * 0.4, point.loss * 0.2)
        label = f"{f'{epoch}/{epochs - 1}':>11s}{'4.41G':>11s}" + "".join(
            f"{value:11.4g}" for value in (*losses, 44, 640)
        )
        log.bar(tqdm_bar(done, batches, done / 6.2, 6.2 / point.pace, label))
        log.steps, log.losses = (epoch * batches + done, done, epoch, epoch + 1), (*losses, sum(losses))
        if inside == shown - 1:
            log.line(
                "\n"
                + " " * 17
                + "Class     Images  Instances          P          R      mAP50   mAP50-95: 100%|██████████| 4/4 [00:01<00:00,  3.32it/s]"
            )
            log.line(
                f"{'all':>22s}{128:>11d}{929:>11d}{point.accuracy:11.3g}{point.accuracy:11.3g}{point.accuracy:11.3g}{point.accuracy:11.3g}"
            )
    if run.finished:
        log.lines("", "30 epochs completed in 0.131 hours.")


@TRAINERS.add(
    "detectron2",
    "facebookresearch/detectron2 detectron2/utils/events.py CommonMetricPrinter",
    '" eta: {}  iter: {}  total_loss: {:.4g}  loss_cls: ...  time: {:.4f}  last_time: ...  data_time: ...  lr: {:.5g}  max_mem: {:.0f}M"',
)
def detectron2(run: Run, log: Log) -> None:
    green, end = "\x1b[32m", "\x1b[0m"
    log.line(
        f"{green}[{run.began:%m/%d %H:%M:%S} d2.engine.train_loop]: {end}Starting training from iteration 0"
    )
    for point in run.points(250, 4.4, 0.6, 0.03):
        step = point.idx * 20 + 19
        log.line(
            f"{green}[{run.at(point.seconds * 6):%m/%d %H:%M:%S} d2.utils.events]: {end} eta: {clock((5000 - step) * 0.31)}  iter: {step}  "
            f"total_loss: {point.loss:.4g}  loss_cls: {point.loss * 0.4:.4g}  loss_box_reg: {point.loss * 0.3:.4g}  loss_rpn_cls: {point.loss * 0.2:.4g}  "
            f"loss_rpn_loc: {point.loss * 0.1:.4g}    time: {0.311 * point.pace:.4f}  last_time: {0.305 * point.pace:.4f}  data_time: 0.0061  last_data_time: 0.0049   "
            f"lr: {0.02 * point.lr_share:.5g}  max_mem: 5312M"
        )
        log.steps, log.losses = (step,), (point.loss,)
    if run.finished:
        log.line(
            f"{green}[{run.at(1600):%m/%d %H:%M:%S} d2.engine.hooks]: {end}Overall training speed: 4998 iterations in 0:25:51 (0.3105 s / it)"
        )


@TRAINERS.add(
    "mmengine",
    "open-mmlab/mmengine mmengine/runner/log_processor.py, mmengine/logging/logger.py",
    '"2026/03/02 10:15:07 - mmengine - INFO - Epoch(train)  [1][ 50/391]  lr: 1.0000e-01  eta: 0:10:00  time: 0.1  data_time: 0.01  memory: 521  loss: 2.1"',
)
def mmengine(run: Run, log: Log) -> None:
    head = "- mmengine - INFO -"
    log.block("""
        2026/03/02 10:15:01 - mmengine - INFO - Config:
        optim_wrapper = dict(
            optimizer=dict(lr=0.1, momentum=0.9, type='SGD', weight_decay=0.0001))
        model = dict(
            head=dict(loss=dict(loss_weight=1.0, type='CrossEntropyLoss'), num_classes=10))
        train_cfg = dict(by_epoch=True, max_epochs=30, val_interval=1)
    """)
    shown, batches = 7, 391
    for point in run.points(30 * shown, 2.3, 0.2, 0.02):
        epoch, inside = divmod(point.idx, shown)
        done, now = (inside + 1) * 50, run.at(point.seconds * 4)
        log.line(
            f"{now:%Y/%m/%d %H:%M:%S} {head} Epoch(train)  [{epoch + 1}][{done:3d}/{batches}]  lr: {0.1 * point.lr_share:.4e}  eta: {clock((210 - point.idx) * 4)}  "
            f"time: {0.081 * point.pace:.4f}  data_time: 0.0132  memory: 521  loss: {point.loss:.4f}"
        )
        log.steps, log.losses = (epoch * batches + done, done), (point.loss,)
        if inside == shown - 1:
            log.line(f"{now:%Y/%m/%d %H:%M:%S} {head} Saving checkpoint at {epoch + 1} epochs")
            log.line(
                f"{now:%Y/%m/%d %H:%M:%S} {head} Epoch(val) [{epoch + 1}][79/79]    accuracy/top1: {100 * point.accuracy:.4f}  data_time: 0.0210  time: 0.0411"
            )
            log.steps += (epoch + 1,)


@TRAINERS.add(
    "open_clip",
    "mlfoundations/open_clip src/open_clip_train/train.py train_one_epoch",
    '"Train Epoch: {} [{}/{} ({:.0f}%)] Data (t): .. Batch (t): .., {:#g}/s, {:#g}/s/gpu LR: {:5f} Logit Scale: {:.3f} Contrastive_loss: .. (..) Loss: .. (..)"',
)
def open_clip(run: Run, log: Log) -> None:
    head = "| INFO | root |"
    log.line(
        f"{run.began:%Y-%m-%d,%H:%M:%S} {head} Running in distributed mode with multiple processes. Device: cuda:0.Process (global: 0, local 0), total 8."
    )
    log.lines(
        *(
            f"{run.began:%Y-%m-%d,%H:%M:%S} {head}   {text}"
            for text in ("lr: 0.0005", "local_loss: True", "epochs: 8", "warmup: 2000")
        )
    )
    shown, samples = 30, 2905954
    mean = 0.0
    for point in run.points(8 * shown, 8.3, 2.1, 0.02):
        epoch, inside = divmod(point.idx, shown)
        seen = (inside * 100 + 1) * 1024
        mean = point.loss if inside == 0 else mean + (point.loss - mean) / (inside + 1)
        log.line(
            f"{run.at(point.seconds * 30):%Y-%m-%d,%H:%M:%S} {head} Train Epoch: {epoch} [{seen:>7}/{samples} ({100 * seen / samples:.0f}%)] Data (t): 0.012 "
            f"Batch (t): {0.301 * point.pace:.3f}, {3401.9 / point.pace:#g}/s, {425.2 / point.pace:#g}/s/gpu LR: {5e-4 * point.lr_share:5f} Logit Scale: {14.3 + point.idx / 9:.3f} "
            f"Contrastive_loss: {point.loss:#.5g} ({mean:#.5g}) Loss: {point.loss:#.5g} ({mean:#.5g})"
        )
        log.steps, log.losses = (epoch * samples + seen, seen, epoch * 2838 + inside * 100 + 1), (point.loss,)
        if inside == shown - 1:
            log.line(f"{run.at(point.seconds * 30):%Y-%m-%d,%H:%M:%S} {head} Start epoch {epoch + 1}")


@TRAINERS.add(
    "dit",
    "facebookresearch/DiT train.py",
    '"[\\033[34m%(asctime)s\\033[0m] (step={:07d}) Train Loss: {:.4f}, Train Steps/Sec: {:.2f}"',
)
def dit(run: Run, log: Log) -> None:
    def say(seconds: float, text: str) -> None:
        log.line(f"[\x1b[34m{run.at(seconds):%Y-%m-%d %H:%M:%S}\x1b[0m] {text}")

    say(0, "DiT Parameters: 675,129,632")
    say(1, "Beginning epoch 0...")
    for point in run.points(240, 0.34, 0.148, 0.012):
        step = (point.idx + 1) * 100
        say(
            point.seconds * 58,
            f"(step={step:07d}) Train Loss: {point.loss:.4f}, Train Steps/Sec: {1.71 / point.pace:.2f}",
        )
        log.steps, log.losses, log.rate = (step,), (point.loss,), 1.71 / point.pace
        if step % 5000 == 0:
            say(point.seconds * 58, f"Saved checkpoint to results/000-DiT-XL-2/checkpoints/{step:07d}.pt")
            say(point.seconds * 58, f"Beginning epoch {step // 5000}...")
    if run.finished:
        say(15000, "Done!")


@TRAINERS.add(
    "k-diffusion",
    "crowsonkb/k-diffusion train.py",
    "'Epoch: {}, step: {}, loss: {:g}, avg loss: {:g}' written through tqdm beside a bar",
)
def k_diffusion(run: Run, log: Log) -> None:
    log.lines(
        "Process 0 using device: cuda",
        "World size: 1",
        "Batch size: 64",
        "Parameters: 54,321,923",
        "Forward pass GFLOPs: 11.213",
    )
    per_epoch, average = 781, None
    for point in run.points(250, 0.42, 0.24, 0.05):
        step = point.idx * 25
        average = point.loss if average is None else 0.95 * average + 0.05 * point.loss
        log.bar(
            " " * 70
            + "\r"
            + f"Epoch: {step // per_epoch}, step: {step}, loss: {point.loss:g}, avg loss: {average:g}\n"
        )
        log.bar(tqdm_bar(step % per_epoch, per_epoch, (step % per_epoch) / 8.8, 8.8 / point.pace))
        log.steps, log.losses = (step,), (point.loss,)


@TRAINERS.add(
    "diffusers",
    "huggingface/diffusers examples/text_to_image/train_text_to_image.py",
    '"Steps:  12%|█▏ | 120/1000 [01:10<08:31,  1.72it/s, lr=1e-5, step_loss=0.131]", a raw loss per step that jumps with the time drawn',
)
def diffusers(run: Run, log: Log) -> None:
    log.line("03/02/2026 10:15:07 - INFO - __main__ - ***** Running training *****")
    for text in ("Num examples = 833", "Num Epochs = 10", "Total optimization steps = 2000"):
        log.line(f"03/02/2026 10:15:07 - INFO - __main__ -   {text}")
    total = 2000
    for point in run.points(total // 4, 0.13, 0.09, 0.55):
        step = (point.idx + 1) * 4
        log.bar(
            tqdm_bar(
                step,
                total,
                step / 1.72,
                1.72 / point.pace,
                "Steps",
                f"lr={1e-5 * point.lr_share:.3g}, step_loss={point.loss:.3g}",
            )
        )
        log.steps, log.losses, log.tolerance, log.rate = (step,), (point.loss,), 0.02, 1.72 / point.pace
        if step % 500 == 0:
            log.line(
                f"03/02/2026 10:30:00 - INFO - accelerate.accelerator - Saving current state to sd-model/checkpoint-{step}"
            )
    if run.finished:
        log.line("\nConfiguration saved in sd-model/vae/config.json")


@TRAINERS.add(
    "pytorch-imagenet",
    "pytorch/examples imagenet/main.py ProgressMeter, AverageMeter",
    '"Epoch: [0][  10/5005]\\tTime  0.3 ( 0.4)\\tData  0.0 ( 0.1)\\tLoss 6.9e+00 (6.9e+00)\\tAcc@1 ..."',
    errors="old_torch",
)
def pytorch_imagenet(run: Run, log: Log) -> None:
    shown, batches = 20, 2000
    mean = 0.0
    log.line("=> creating model 'resnet18'")
    for point in run.points(10 * shown, 7.0, 1.9, 0.015):
        epoch, inside = divmod(point.idx, shown)
        done = inside * 100
        mean = point.loss if inside == 0 else mean + (point.loss - mean) / (inside + 1)
        acc = 100 * point.accuracy
        log.line(
            f"Epoch: [{epoch}][{done:4d}/{batches}]\tTime {0.24 * point.pace:6.3f} ({0.25:6.3f})\tData {0.01:6.3f} ({0.02:6.3f})\tLoss {point.loss:.4e} ({mean:.4e})\t"
            f"Acc@1 {acc:6.2f} ({acc:6.2f})\tAcc@5 {acc:6.2f} ({acc:6.2f})"
        )
        log.steps, log.losses = (epoch * batches + done, epoch * batches + done + 1, done), (point.loss, mean)
        if inside == shown - 1:
            log.line(
                f"Test: [  0/196]\tTime  1.201 ( 1.201)\tLoss {point.valid_loss:.4e} ({point.valid_loss:.4e})\tAcc@1 {acc:6.2f} ({acc:6.2f})\tAcc@5 {acc:6.2f} ({acc:6.2f})"
            )
            log.line(f" *   Acc@1 {acc:.3f} Acc@5 {acc:.3f}")
            log.losses += (point.valid_loss,)


@TRAINERS.add(
    "pytorch-mnist",
    "pytorch/examples mnist/main.py",
    "'Train Epoch: {} [{}/{} ({:.0f}%)]\\tLoss: {:.6f}' and '\\nTest set: Average loss: {:.4f}, Accuracy: {}/{} ({:.0f}%)\\n'",
    errors="old_torch",
)
def pytorch_mnist(run: Run, log: Log) -> None:
    shown, size = 30, 60000
    for point in run.points(14 * shown, 2.3, 0.02, 0.35):
        epoch, inside = divmod(point.idx, shown)
        done = inside * 2000
        log.line(
            f"Train Epoch: {epoch + 1} [{done}/{size} ({100 * done / size:.0f}%)]\tLoss: {point.loss:.6f}"
        )
        log.steps, log.losses = (epoch * size + done, done, epoch + 1), (point.loss,)
        if inside == shown - 1:
            correct = int(10000 * point.accuracy)
            log.lines(
                "",
                f"Test set: Average loss: {point.valid_loss:.4f}, Accuracy: {correct}/10000 ({correct / 100:.0f}%)",
                "",
            )
            log.losses += (point.valid_loss,)


@TRAINERS.add(
    "nerfstudio",
    "nerfstudio-project/nerfstudio nerfstudio/utils/writer.py LocalWriter",
    '"Step (% Done)       Train Iter (time)    ETA (time)           Train Rays / Sec", rows repainted with the cursor: no loss',
    has_loss=False,
)
def nerfstudio(run: Run, log: Log) -> None:
    header = f"{'Step (% Done)':<20}" + "".join(
        f"{name:<20} " for name in ("Train Iter (time)", "ETA (time)", "Train Rays / Sec")
    )
    log.lines(header, "-" * len(header))
    for point in run.points(300):
        step = point.idx * 100
        log.parts.append("\x1b[3A")
        log.line(f"{header:<100} \x1b[0m")
        row = (
            f"{f'{step} ({step / 300:.02f}%)':<20}"
            + f"{f'{31.2 * point.pace:.3f} ms':<20} {'12 m, 31 s':<20} {f'{131.1 / point.pace:.2f} K':<20} "
        )
        log.line(f"{row:<100} \x1b[0m")
        log.line("\x1b[30;42mViewer running locally at: http://localhost:7007 (listening on 0.0.0.0)\x1b[0m")


@TRAINERS.add(
    "edm2-console",
    "NVlabs/edm2 training/training_loop.py (status line)",
    '"Status: kimg {:<9.1f} time {:<12s} sec/tick {:<8.2f} sec/kimg ... cpumem ... gpumem ... reserved": no loss at all',
    has_loss=False,
)
def edm2_console(run: Run, log: Log) -> None:
    log.lines(
        "Loading dataset...",
        "Setting up encoder...",
        "Constructing network...",
        "Training from 0 kimg to 16384 kimg:",
        "",
    )
    for point in run.points(130):
        log.line(
            f"Status: kimg {point.idx * 128.0:<9.1f} time {clock(point.seconds * 160):<12s} sec/tick {160 * point.pace:<8.2f} "
            f"sec/kimg {1.251 * point.pace:<7.3f} maintenance {0.4:<7.2f} cpumem {6.21:<6.2f} gpumem {42.11:<6.2f} reserved 44.02"
        )
