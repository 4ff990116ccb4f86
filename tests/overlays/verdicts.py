"""What each probe must say of each release, written down by hand from the defect register and upstream's history.

D defective, F fixed, - absent. Columns are `RELEASES`.
"""

RELEASES = ("0.5.9", "0.5.10", "0.5.10.post1", "0.5.11", "0.5.12", "0.5.13", "0.5.15", "0.5.18", "0.5.20", "0.5.23")

VERDICTS = {
    "tp-ready         ": "- D D D D D D D D D",
    "pp-layer         ": "- D D D D D D D D D",
    "finish-unbuffered": "- D D D D D D D D F",
    "retract-once     ": "- D D D F F F F F F",
    "direct-flag      ": "- D D D F F F F F F",
    "retract-order    ": "- D D F F F F F F F",
    "pause-staged     ": "- D D D D D D D D D",
    "staging-abort    ": "- D D D D D D D D D",
    "waiting-abort    ": "- F F F D D D D D F",
    "late-transfer    ": "- D D D D D D D D F",
    "pd-retract       ": "- D D D D D D D D D",
    "replayed-token   ": "- - - - - - - - - D",
    "rebootstrap-room ": "- - - - - - - D D D",
    "rebootstrap-adapter": "- - - - - - - D D D",
    "quick-finish     ": "- D D F F F F F F F",
    "checksum-drop    ": "- - - - - - - - - D",
    "chunked-abort    ": "- - - - - - - - - D",
    "batch-full       ": "- D D F F F F F F F",
    "slot-count       ": "- D D D F F F F F F",
    "idle-staging     ": "- D D F F F F F F F",
    "mixed-chunk      ": "- D D D D D D D D F",
    "staged-batch     ": "- - - - - D F F F F",
    "prefill-estimate ": "- D D F F F F F F F",
    "decode-memory    ": "- D D D D D D D D D",
    "staging-memory   ": "- D D D D D D D D D",
    "admission-memory ": "- D D D D D D D D D",
    "length-limit     ": "- D D D D D D D D D",
    "prealloc-memory  ": "- D D D D D D D D D",
    "held-abort       ": "- - - - - - - D D D",
    "index-upload     ": "- D D F F F F F F F",
    "logprob-ids      ": "- D D D D D D D D D",
    "logprob-none     ": "- D D D D D D D D F",
    "multimodal-batch ": "- D D D D D D D D D",
    "swap-in          ": "- D D D D D D D D D",
    "observe          ": "- D D D D D D D D D",
    "speculative      ": "- D D D D D D - - F",
    "speculative-guard": "- - - - - - - D D F",
}
