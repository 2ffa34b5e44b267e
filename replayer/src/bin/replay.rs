//! `replay --dump DIR --step 0 --compare dq,dk,label_logits`

fn main() {
    std::process::exit(backtape_replayer::cli::main(std::env::args_os()));
}
