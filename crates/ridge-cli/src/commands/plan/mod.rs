//! `ridge plan`: predicted memory, time and cost of a model on given hardware. One file per subcommand; they share `target`
//! (the model and the device), `parsers` of values, and the output `page`.

mod comm;
mod devices;
mod diagnose;
mod fit;
mod host;
mod kernel;
mod page;
mod parsers;
mod pipeline;
mod serve;
mod shape;
mod target;
mod topology;
mod train;

use clap::{Args, Subcommand};

use comm::PlanCommArgs;
use devices::PlanDevicesArgs;
use diagnose::PlanDiagnoseArgs;
use fit::PlanFitArgs;
use kernel::PlanKernelArgs;
use pipeline::PlanPipelineArgs;
use serve::PlanServeArgs;
use topology::PlanTopologyArgs;
use train::PlanTrainArgs;

use crate::error::Result;

/// Predict memory, time and cost on given hardware
#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    #[command(subcommand)]
    command: PlanCommand,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
enum PlanCommand {
    Fit(PlanFitArgs),
    Kernel(PlanKernelArgs),
    Train(PlanTrainArgs),
    Serve(PlanServeArgs),
    Comm(PlanCommArgs),
    Pipeline(PlanPipelineArgs),
    Topology(PlanTopologyArgs),
    Diagnose(PlanDiagnoseArgs),
    Devices(PlanDevicesArgs),
}

/// Runs the command.
///
/// # Errors
/// When an argument cannot be used, or a file cannot be read or written.
pub(crate) fn run(args: &PlanArgs) -> Result<()> {
    match &args.command {
        PlanCommand::Fit(args) => fit::run(args),
        PlanCommand::Kernel(args) => kernel::run(args),
        PlanCommand::Train(args) => train::run(args),
        PlanCommand::Serve(args) => serve::run(args),
        PlanCommand::Comm(args) => comm::run(args),
        PlanCommand::Pipeline(args) => pipeline::run(args),
        PlanCommand::Topology(args) => topology::run(args),
        PlanCommand::Diagnose(args) => diagnose::run(args),
        PlanCommand::Devices(args) => devices::run(args),
    }
}
