"""Progress bars as they end in a file: tqdm's, with carriage returns, and a clock."""


def clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes:02d}:{seconds:02d}"


def tqdm_rate(per_second: float, unit: str = "it") -> str:
    return f"{per_second:5.2f}{unit}/s" if per_second >= 1 else f"{1 / per_second:5.2f}s/{unit}"


def tqdm_bar(
    done: int, total: int, seconds: float, rate: float, label: str = "", postfix: str = "", unit: str = "it"
) -> str:
    """`label:  42%|████▏     | 42/100 [00:21<00:29,  1.98it/s, loss=3.21]`"""
    share, width = done / total, 10
    whole = int(share * width * 8)
    blocks = "█" * (whole // 8) + (" ▏▎▍▌▋▊▉"[whole % 8] if whole % 8 else "")
    left = clock((total - done) / rate) if rate else "?"
    speed = tqdm_rate(rate, unit) if rate else "?" + unit + "/s"
    end = f", {postfix}" if postfix else ""
    head = f"{label}: " if label else ""
    return f"{head}{share:4.0%}|{blocks:<{width}}| {done}/{total} [{clock(seconds)}<{left}, {speed}{end}]"
