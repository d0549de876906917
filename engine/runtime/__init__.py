"""llama.cpp through the low-level API of llama-cpp-python: owned lifetimes, exceptions, no pointers above here."""
