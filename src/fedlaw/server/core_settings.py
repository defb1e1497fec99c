"""The settings of core judging, every constant named."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Self

from fedlaw._checks import check_choice, check_integer, check_number, check_positive
from fedlaw.server.judge import at_least, share


@dataclass(frozen=True)
class CoreSettings:
    """Settings of core judging. Defaults are the plain recipe: what preset `hardened` adds to it is off.

    Attributes:
        attackers_below: the share of clients that may be malicious, all that has to be known: the core has
            n - floor(share * n) seats, and never are more than floor(share * n) clients shut out.
        judged_rounds: rounds with two phases before the freeze; None: min(80, judged_share of all rounds).
        judged_share: see there.
        window: own answered rounds whose mean cosine decides at the freeze; None: 3/8 of the judged rounds.
        longest: rounds with two phases at most, should a new core be seated late; None: as many as that can take.
        decay: what the accumulated score is multiplied by each round, from round 3 on.
        loss_weight: lambda, weight of the loss score against the cosine.
        loss_bound: loss scores are clipped to plus or minus this.
        equal_losses: "count": as they are; "once": a single group of equal losses, as large as a cluster of copies
            and no larger than may attack, counts once in the median and the MAD that losses are scored by.
        strike_ratio: a norm over this many median norms is a strike.
        strikes_allowed: strikes that are forgiven.
        copy_ratio: updates closer than this share of the median norm are near-identical.
        copy_share, copy_least: a cluster of copies counts from max(copy_least, ceil(copy_share * n)) on.
        sittings_allowed: how often a cluster sits out before it is excluded.
        too_good_from, too_good_to: own answered rounds whose mean cosine the too-good check takes.
        too_good_gap: width of the gap above which a group is too good to be true, if all of it reaches the level.
        too_good_level: mean cosine that such a group must reach; -1: any.
        too_good_wide: width of the gap above which a group is too good to be true at any level.
        too_good_share, too_good_least, too_good_most: size of such a group: max(too_good_least,
            ceil(too_good_share * n)) to floor(too_good_most * n).
        majority: most clients may replace the core, where a minority that is content with it holds it: where they
            are on average this far against it, or where it has gone idle. It takes `two_groups`. 0: never.
        majority_rounds: in how many rounds of a window, those in which most stood lowest, they must be against it;
            and for how many judged rounds in a row that must be seen.
        majority_window: own answered rounds that a client must have been heard in, and whose mean cosines tell
            whether the core is idle.
        turnover: share of the core's seats that may have changed hands in the last half window at the freeze; with
            more, judging starts again. 1: any.
        fade: judging ends, before its rounds are over, when the s clients that kept most of their peak have, in the
            median, less than this share of it left, and whoever would be left out is as far below everybody
            else; with `majority`, where nobody would be, also everybody's direction must mean as little to most
            clients. 0: it never does.
        fade_rounds: own answered rounds that this takes the mean cosine of, and rounds in a row that it must hold.
        quiet: a judged round is quiet where the core's own median cosine, of means over `fade_rounds`, is under
            this. Where that of its windows is, too, at the freeze, the other rounds decide. -1: no round is.
        threshold: windowed cosine above which a client outside the core is admitted at the freeze.
        two_groups: where the clients fall into two groups that are this far apart (the difference of their mean
            cosines over the sum of their deviations), and the lower one is below zero on average, nobody of it is
            admitted from outside the core. By the worst quarter of each client's rounds they may, too, with a gap
            of `fade` peaks (not where that is 0): attackers that take turns. 0: the threshold alone decides.
        two_groups_share: of a client's judged rounds, how many of the last ones that takes the mean cosine of.
        presence: share of the judged rounds it was asked in that a client must have been scored in.
        quorum: share of the core that must answer, or the round is skipped.
        competence: median windowed cosine of the core under which its verdict is reported as no evidence.
        count_cap: example counts are bounded by this many median counts in the final weights.
        catch_up: after the freeze, members whose share of the steps so far is smaller than their weight catch up:
            for a while they have up to this many times their weight. 1: they do not.
        catch_up_share: of the rounds that were judged: over how many rounds after the freeze.
        refresh_period: rounds from one refresh to the next after the freeze; 0: none.
        refresh_rounds: two-phase rounds of one refresh.
        refresh_gap: width of the gap that a member must also be below to leave in a refresh; with one, who joins
            must exceed `refresh_above`; 0: groups decide where there is `two_groups`, else the threshold alone.
        refresh_above: mean cosine above which an outsider may join in a refresh with a gap or by groups.
        refresh_bursts: refreshes in a row above the threshold before an outsider joins.
    """

    attackers_below: float = 0.45
    judged_rounds: int | None = None
    judged_share: float = 0.4
    window: int | None = None
    longest: int | None = None
    decay: float = 0.95
    loss_weight: float = 0.03
    loss_bound: float = 3.0
    equal_losses: Literal["count", "once"] = "count"
    strike_ratio: float = 5.0
    strikes_allowed: int = 1
    copy_ratio: float = 0.05
    copy_share: float = 0.03
    copy_least: int = 3
    sittings_allowed: int = 1
    too_good_from: int = 4
    too_good_to: int = 10
    too_good_gap: float = 0.12
    too_good_level: float = -1.0
    too_good_wide: float = 2.0
    too_good_share: float = 0.03
    too_good_least: int = 2
    too_good_most: float = 0.49
    majority: float = 0.0
    majority_rounds: int = 3
    majority_window: int = 5
    turnover: float = 1.0
    fade: float = 0.0
    fade_rounds: int = 5
    quiet: float = -1.0
    threshold: float = -0.03
    two_groups: float = 0.0
    two_groups_share: float = 0.67
    presence: float = 0.5
    quorum: float = 0.5
    competence: float = 0.04
    count_cap: float = 2.0
    catch_up: float = 1.0
    catch_up_share: float = 0.25
    refresh_period: int = 0
    refresh_rounds: int = 5
    refresh_bursts: int = 2
    refresh_gap: float = 0.0
    refresh_above: float = 0.02

    def __post_init__(self) -> None:
        check_number("attackers_below", self.attackers_below, low=0, high=0.5, open_low=True)
        if self.attackers_below == 0.5:
            raise ValueError(
                "attackers_below must be under 0.5, got 0.5: with half of the clients the core is theirs"
            )
        check_number("decay", self.decay, low=0, high=1, open_low=True)
        for name in ("judged_rounds", "window", "longest"):
            if getattr(self, name) is not None:
                check_integer(f"{name} (or None)", getattr(self, name), 1)
        for name in (
            "copy_least", "too_good_least", "too_good_from", "too_good_to", "refresh_bursts", "majority_rounds",
            "majority_window", "fade_rounds",
        ):  # fmt: skip
            check_integer(name, getattr(self, name), 1)
        for name in ("strikes_allowed", "sittings_allowed", "refresh_period"):
            check_integer(name, getattr(self, name))
        for name in (
            "presence",
            "quorum",
            "copy_share",
            "too_good_share",
            "too_good_most",
            "turnover",
            "fade",
            "judged_share",
            "catch_up_share",
            "two_groups_share",
        ):
            check_number(name, getattr(self, name), low=0, high=1)
        for name in ("strike_ratio", "count_cap", "catch_up"):
            check_number(name, getattr(self, name), low=1)
        for name in (
            "loss_weight",
            "copy_ratio",
            "too_good_gap",
            "too_good_wide",
            "majority",
            "refresh_gap",
            "two_groups",
        ):
            check_number(name, getattr(self, name), low=0)
        for name in ("threshold", "competence", "refresh_above", "too_good_level", "quiet"):
            check_number(name, getattr(self, name), low=-1, high=1)
        check_positive("loss_bound", self.loss_bound)
        check_choice("equal_losses", self.equal_losses, ("count", "once"))
        if self.too_good_from > self.too_good_to:
            raise ValueError(
                f"too_good_from must be from 1 to too_good_to = {self.too_good_to}, got {self.too_good_from}"
            )
        if self.majority and not self.two_groups:
            raise ValueError(
                f"majority = {self.majority:g} takes two_groups above 0 (2.2 in preset hardened), got 0"
            )
        if self.refresh_period and not 1 <= self.refresh_rounds <= self.refresh_period:
            raise ValueError(
                f"refresh_rounds must be from 1 to refresh_period = {self.refresh_period}, "
                f"got {self.refresh_rounds}"
            )

    def bind(self, n: int, rounds: int) -> Self:
        """The settings with `judged_rounds`, `window` and `longest` resolved for n clients and `rounds` rounds."""
        judged = self.judged_rounds or max(1, min(80, share(self.judged_share, rounds)))
        window = self.window or max(1, 3 * judged // 8)
        if judged > rounds:
            raise ValueError(f"judged_rounds must be at most rounds = {rounds}, got {judged}")
        window = min(window, judged)
        late = window + self.majority_rounds if self.majority else window if self.turnover < 1 else 0
        longest = self.longest or judged + late
        return replace(self, judged_rounds=judged, window=window, longest=max(judged, min(longest, rounds)))

    def group(self, n: int) -> int:
        """How many of n clients make a group that stands apart, rather than a few that happen to."""
        return max(self.too_good_least, at_least(self.too_good_share, n))

    def most_out(self, n: int) -> int:
        """How many of n clients may be shut out at most: floor(attackers_below * n)."""
        return share(self.attackers_below, n)
