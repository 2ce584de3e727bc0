"""A picture of what a run will do step by step, before anything is spent: `mmldlm train --dry-run --plot FILE`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mmldlm.config import OptimConfig
from mmldlm.pictures import BLUE, GREEN, GREY, ORANGE, Picture, make_panels
from mmldlm.training.plan import Course

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {"l2t": BLUE, "t2l": ORANGE, "joint": GREEN}


def draw_course(course: Course, optim: OptimConfig) -> Picture:
    """Learning rate, size of a step, and shares of the modes, one above the other."""

    def rate(axes: Axes) -> None:
        axes.plot(course.steps, course.lr, color=BLUE)
        axes.set_ylim(bottom=0.0)
        axes.set_ylabel("learning rate")
        axes.set_title(f"optim.schedule={optim.schedule}", loc="left")
        if optim.schedule == "plateau":
            axes.axhline(optim.plateau_min_lr, color=GREY, linestyle=":", label="optim.plateau_min_lr")
            axes.plot([], [], color=BLUE, label="before any reduction")
            axes.legend()

    def size(axes: Axes) -> None:
        axes.plot(course.steps, course.tokens, color=BLUE)
        axes.set_ylim(0.0, 1.1 * max(course.tokens))
        axes.set_ylabel("tokens per step")
        length = course.tokens[0] / course.documents[0]  # on average the same at every step
        documents = axes.secondary_yaxis("right", functions=(_times(1.0 / length), _times(length)))
        documents.set_ylabel("documents per step")

    def modes(axes: Axes) -> None:
        chosen = {mode: shares for mode, shares in course.modes.items() if max(shares) > 0}
        colours = [_COLOURS[mode] for mode in chosen]
        axes.stackplot(
            course.steps, *chosen.values(), labels=list(chosen), colors=colours, alpha=0.7, step="post"
        )
        axes.set_ylim(0.0, 1.0)
        axes.set_ylabel("share of modes")
        axes.set_xlabel("step")
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 0.98), ncols=len(chosen))

    caption = "As the settings alone decide it; rollbacks and reductions on a plateau come on top."
    return make_panels("course", "The course of the run", caption, [rate, size, modes])


def _times(factor: float) -> Callable[[Any], Any]:
    return lambda values: factor * values
