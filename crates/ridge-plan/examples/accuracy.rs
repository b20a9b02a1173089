//! Prints how near plans come to published measurements; `cargo xtask accuracy` runs it.

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures");
    let (flags, folders): (Vec<String>, Vec<String>) = std::env::args().skip(1).partition(|a| a == "--rows");
    let folder = folders.first().map_or_else(|| fixtures.join("planner"), Into::into);
    match ridge_plan::accuracy::report(&folder, &fixtures.join("configs")) {
        Ok(mut sections) => {
            for section in &mut sections {
                section.shown |= !flags.is_empty();
                println!("{section}");
            }
            let reached = sections.iter().filter(|s| s.reached()).count();
            println!("{reached} of {} targets reached", sections.len());
            ExitCode::SUCCESS
        }
        Err(why) => {
            eprintln!("accuracy: {why}");
            ExitCode::FAILURE
        }
    }
}
