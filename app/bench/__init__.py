"""The benchmark: prompts, configurations, rounds, their summary, and the peer it is compared with."""
