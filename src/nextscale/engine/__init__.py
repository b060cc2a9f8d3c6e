"""One call: what was asked for, the next-scale loop, what it leaves."""
