"""What a run shows and leaves behind: metrics, the live display, timelines, the summary."""
