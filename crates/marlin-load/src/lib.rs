//! A load generator for servers of large language models with OpenAI's API.
//!
//! [`run`] sends requests with random prompts to `/v1/completions` or `/v1/chat/completions`, in an
//! open loop (Poisson, gamma or constant arrivals) or a closed loop, reads the streams, and returns
//! a [`LoadReport`] with the figures of `vllm bench serve`: its `Display` is the table,
//! [`LoadReport::to_json`] has every request, [`LoadReport::to_svg`] draws the distributions, and
//! [`rates_svg`] draws runs at several rates. Load goes to loopback addresses only, unless
//! [`LoadOptions::allow_remote`] is set.
//!
//! ```no_run
//! use marlin_load::{Amount, Length, LoadOptions, run};
//!
//! let mut options = LoadOptions::new("http://127.0.0.1:8000");
//! options.load.rate = Some(4.0);
//! options.amount = Amount::Requests(200);
//! options.input_len = Length::fixed(64);
//! options.output_len = Length { min: 32, max: 96 };
//! options.ignore_eos = true;
//! println!("{}", run(&options)?);
//! # Ok::<(), marlin_load::LoadError>(())
//! ```

mod arrival;
mod client;
mod error;
mod generate;
mod metrics;
mod options;
mod plot;
mod prompt;
mod rates;
mod record;
mod report;
mod run;
mod sse;

pub use error::{Failure, LoadError};
pub use metrics::{Metrics, Summary};
pub use options::{Amount, Endpoint, Length, Load, LoadOptions, PromptKind, Slo};
pub use rates::{RatePoint, RateSeries, rates_svg};
pub use record::{Outcome, RequestRecord};
pub use report::LoadReport;
pub use run::{LoadProgress, run, run_with};
