//! `replay --dump DIR --step 0 --compare dq,dk,label_logits`

use backtape_replayer::spill::Spilling;

#[global_allocator]
static SPILLING: Spilling = Spilling;

fn main() {
    std::process::exit(backtape_replayer::cli::main(std::env::args_os()));
}
