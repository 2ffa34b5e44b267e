//! The recorder that lives inside a rank of a training job.
