"""When policy `scheduled` drafts although plain decoding is faster: without drafts there are no confidences."""

from __future__ import annotations

import dataclasses

FIRST_WAIT, LONGEST_WAIT = 16, 256
"""Steps without drafting before the first probe; every probe that changes nothing doubles them, up to the second."""


@dataclasses.dataclass
class Probing:
    """Steps since the last draft, and how many there may be.

    A probe costs what drafting costs, so a load under which drafting never pays is asked less and less often.
    """

    waited: int = 0
    wait: int = FIRST_WAIT

    def skips(self, pays: bool) -> bool:
        """Whether a step goes without drafts, given that drafting seems to pay or not; called once a step."""
        if pays:
            self.waited, self.wait = 0, FIRST_WAIT
            return False
        if self.waited < self.wait:
            self.waited += 1
            return True
        self.waited, self.wait = 0, min(2 * self.wait, LONGEST_WAIT)
        return False
