//! The Python binding of backtape.
