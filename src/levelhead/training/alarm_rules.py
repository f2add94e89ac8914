"""What each alarm is the rule of: which Reading, which level, which change, which cure.

All rules have one shape. A reading (of the run, a layer or a head) is compared with its own typical
earlier value, the median of the last `window` readings before it left:

    level        it is on the wrong side of a fixed level
    change       and is away from its earlier value by a factor, and by more than its spread
    persistence  and for some sampled readings in a row does not come back by the factor `clear`
    witness      and, of entropy, the logits grew with it by a factor
    worth        and, where the rule says so, the loss gained nothing by it

Trained attention may be sharp, uniform or redundant because that is what lowers the loss. So
*entropy collapse*, *rank collapse* and *head collapse* are defined as changes the loss did not gain
by: a copying head whose entropy falls while the loss falls is no collapse, one whose entropy falls
on a loss that stands still or rises is one. Beyond `hard` no such excuse counts. Sharpness is
excused by a large gain only. A run that starts on the wrong side has no onset and no alarm; the
figures of a run say so as an observation.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from levelhead.base.errors import InputError

__all__ = ["ALARMS", "CURES", "Rule", "Thresholds", "rules"]

ALARMS = (
    "entropy_collapse",
    "rank_collapse",
    "head_collapse",
    "dead_head",
    "sharpness_spike",
    "exploding_logits",
    "loss_oscillation",
)

CURES = {
    "entropy_collapse": "σReparam or QK-clip on this layer, a lower rate or a longer warm-up",
    "rank_collapse": "less weight decay on Q and K, a rank floor or an entropy ceiling, 1/√depth "
    "on the residual branches",
    "head_collapse": "the coherence penalty (log-det where heads are copies already), and noise "
    "on the heads to part them",
    "dead_head": "less weight decay on V and O, starting the head anew, or pruning it",
    "sharpness_spike": "a lower rate or a longer warm-up, clipped gradients, SAM",
    "exploding_logits": "QK-clip, σReparam, a norm on queries and keys, or a lower rate",
    "loss_oscillation": "a lower rate, a larger batch, clipped gradients, a smaller β₂ of Adam",
}


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """All numbers of the rules. Counts are of sampled readings, factors and shares have unit 1.

    persistence: readings in a row beyond the threshold before an alarm is raised, and back before
        it is cleared; sharpness_persistence: the same for sharpness;
        swing_persistence: for the swing of the loss, which a short excursion raises as well.
    window, least_history: at most and at least so many readings make the earlier value.
    spread: a change must also exceed so many robust standard deviations of earlier log values.
    clear: factor by which a reading must be back from its threshold to clear an alarm.
    entropy_level, entropy_fall: share of the largest entropy; factor of its fall.
    entropy_logit_rise: factor by which the largest logit must have grown with it, where it is read.
    rank_level, rank_fall, rank_hard: ‖A - 11ᵀA/n‖/‖A‖ of the maps, 0 at rank one.
    coherence_level, coherence_rise, coherence_hard: the smaller one of QK and OV coherence.
    dead_level, dead_fall: norm of a head's OV map over the median of the other heads'.
    logit_level, logit_rise, logit_hard: largest |logit|.
    sharpness_rise: factor of λ_max; sharpness_gain: it may grow while the loss falls by so much
        of its scale, as when a task is suddenly learnt.
    swing_level, swing_rise: swing of the loss over its scale (see `alarm_loss`).
    loss_gain, loss_z: the loss gained if it fell by more than this share of its scale and
        by more than so many standard errors.
    harm_rise, harm_z: the loss rose, likewise. harm_spike, spike_z: one loss stood above the level
        before by this share of the scale and by so many standard deviations of single losses.
    harm_gap: the validation loss lies above its best by this share.

    The defaults were fixed on the development half of `levelhead study alarms`, where they find
    what is planted and are silent in healthy training: sharpness is held against the upper quartile
    of earlier values, for in healthy training λ_max is restless and grows fivefold when a task is
    suddenly learnt; the swing of the loss must reach a fifth of its scale four times in a row, for
    a late spike of Adam's swings by less, or shorter.

    Raises `InputError` for a number that is not positive, or a factor of 1 or less.

    >>> Thresholds(persistence=2).persistence
    2
    """

    persistence: int = 3
    sharpness_persistence: int = 3
    swing_persistence: int = 4
    window: int = 40
    least_history: int = 3
    spread: float = 2.0
    clear: float = 1.5
    entropy_level: float = 0.05
    entropy_fall: float = 3.0
    entropy_logit_rise: float = 1.7
    rank_level: float = 0.05
    rank_fall: float = 3.0
    rank_hard: float = 0.002
    coherence_level: float = 0.5
    coherence_rise: float = 2.0
    coherence_hard: float = 0.9
    dead_level: float = 0.05
    dead_fall: float = 5.0
    logit_level: float = 100.0
    logit_rise: float = 3.0
    logit_hard: float = 2000.0
    sharpness_rise: float = 3.0
    sharpness_gain: float = 0.4
    swing_level: float = 0.2
    swing_rise: float = 2.0
    loss_gain: float = 0.01
    loss_z: float = 2.0
    harm_rise: float = 0.02
    harm_z: float = 5.0
    harm_spike: float = 0.2
    spike_z: float = 10.0
    harm_gap: float = 0.1

    def __post_init__(self) -> None:
        for part in fields(self):
            value = getattr(self, part.name)
            factor = part.name == "clear" or part.name.endswith(("_fall", "_rise"))
            least = 1 if factor and part.name != "harm_rise" else 0
            if not value > least:
                raise InputError(
                    f"The threshold {part.name}={value!r} of the alarms must be above {least}."
                )


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule: alarm `name` over readings called `reading`, away upwards (`up`) or downwards.

    level: the fixed level; change: the factor; hard: beyond it the loss is not asked (None: it
    always is); alone: hard counts without earlier readings too; margin: the earlier value must
    have been on the right side by the factor `clear`; asks: whether the loss is asked at all;
    gain: what it must have gained instead of `loss_gain`; what: the reading in words, for the
    evidence; crest: the earlier value is the upper quartile instead of the median and its spread,
    for a reading that is restless.
    """

    name: str
    reading: str
    what: str
    up: bool
    level: float
    change: float
    persistence: int
    hard: float | None = None
    alone: bool = False
    margin: bool = True
    asks: bool = True
    gain: float | None = None
    witness: str = ""
    witness_rise: float = 1.0
    unit: str = "1"
    crest: bool = False

    def beyond(self, value: float, limit: float) -> bool:
        """Whether `value` lies on the wrong side of `limit`, or on it."""
        return value >= limit if self.up else value <= limit


def rules(limits: Thresholds) -> tuple[Rule, ...]:
    """The rules at these thresholds, in the order of `ALARMS`.

    >>> [rule.name for rule in rules(Thresholds())] == list(ALARMS)
    True
    """
    many, few = limits.persistence, limits.sharpness_persistence
    return (
        Rule(
            name="entropy_collapse", reading="attention_entropy_share", what="entropy share",
            up=False, level=limits.entropy_level, change=limits.entropy_fall, persistence=many,
            witness="largest_logit", witness_rise=limits.entropy_logit_rise,
        ),
        Rule(
            name="rank_collapse", reading="map_residual", what="distance of the maps to rank one",
            up=False, level=limits.rank_level, change=limits.rank_fall, persistence=many,
            hard=limits.rank_hard,
        ),
        Rule(
            name="head_collapse", reading="coherence", what="coherence of QK and of OV",
            up=True, level=limits.coherence_level, change=limits.coherence_rise, persistence=many,
            hard=limits.coherence_hard,
        ),
        Rule(
            name="dead_head", reading="ov_share", what="OV norm over that of the other heads",
            up=False, level=limits.dead_level, change=limits.dead_fall, persistence=many,
            asks=False,
        ),
        Rule(
            name="sharpness_spike", reading="largest_hessian_eigenvalue", what="λ_max",
            up=True, level=0.0, change=limits.sharpness_rise, persistence=few,
            margin=False, gain=limits.sharpness_gain, crest=True,
        ),
        Rule(
            name="exploding_logits", reading="largest_logit", what="largest |logit|",
            up=True, level=limits.logit_level, change=limits.logit_rise, persistence=many,
            hard=limits.logit_hard, alone=True, margin=False, asks=False, unit="logit",
        ),
        Rule(
            name="loss_oscillation", reading="swing", what="swing of the loss over its scale",
            up=True, level=limits.swing_level, change=limits.swing_rise,
            persistence=limits.swing_persistence,
            margin=False, asks=False, crest=True,
        ),
    )  # fmt: skip
