//! What the command says of itself: completions and the manual page.

use clap::CommandFactory;

use super::args::Arguments;

/// Completions of a shell, for it to read.
pub(super) fn completions(shell: clap_complete::Shell) -> String {
    let mut out = Vec::new();
    clap_complete::generate(shell, &mut Arguments::command(), "replay", &mut out);
    String::from_utf8_lossy(&out).into_owned()
}

/// The manual page and those of the subcommands, one after the other, in roff.
pub(super) fn manual() -> String {
    let mut out = Vec::new();
    let mut command = Arguments::command();
    command.build();
    // Writing into memory cannot fail.
    let _ = clap_mangen::Man::new(command.clone()).render(&mut out);
    for subcommand in command.get_subcommands().filter(|subcommand| subcommand.get_name() != "help")
    {
        let _ = clap_mangen::Man::new(subcommand.clone()).render(&mut out);
    }
    String::from_utf8_lossy(&out).into_owned()
}
