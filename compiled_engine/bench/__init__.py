"""Load generator and statistics, used by `compiled-engine bench` and by `perf/`."""
