"""The device scheduler: row states, page pool and prefix index as tensors that steps advance."""
