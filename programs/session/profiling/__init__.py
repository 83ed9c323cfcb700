"""Where the time of a run goes: what each node measures, and what it says about the run."""
