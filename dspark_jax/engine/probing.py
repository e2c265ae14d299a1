"""When policy `scheduled` drafts although plain decoding seems faster: without drafts there are no confidences."""

from __future__ import annotations

import dataclasses

VENTURE, LONGEST_WAIT = 0.01, 256
"""A probe comes after the square of the drafts' shortfall over the first steps without one, the second at the latest.

Where drafting almost pays, it is tried often: a forecast that is too low is corrected by drafts alone, while one that
is too high is corrected anyway, so that a scheduler that seldom looks ends up with plain decoding. A forecast is seldom
wrong by more than a third: with a shortfall of 10 % a probe comes after 1 step, with 50 % after 25.
"""


@dataclasses.dataclass
class Probing:
    """Steps without drafts since the last one with."""

    waited: int = 0

    def drafts(self, shortfall: float) -> bool:
        """Whether a step drafts; called once a step.

        Args:
            shortfall: how much more than expected drafts would have to bring to pay, as a share; 0 or less where they
                do.
        """
        if shortfall > 0 and self.waited < min(shortfall**2 / VENTURE, LONGEST_WAIT):
            self.waited += 1
            return False
        self.waited = 0
        return True
