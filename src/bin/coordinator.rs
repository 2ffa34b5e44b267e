//! `coordinator --listen 127.0.0.1:7447 --store DIR|s3://… --world-size N`

fn main() {
    std::process::exit(backtape::cli::main(std::env::args_os()));
}
