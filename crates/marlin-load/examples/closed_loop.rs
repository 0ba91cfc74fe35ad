//! Sends requests in a closed loop, and prints the table and, as the last line, the JSON without
//! the requests:
//!
//! `closed_loop URL REQUESTS CONCURRENCY INPUT_LEN OUTPUT_LEN [chat]`

use marlin_load::{Amount, Endpoint, Length, LoadOptions, run};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [url, requests, concurrency, input_len, output_len, rest @ ..] = arguments.as_slice()
    else {
        return Err("closed_loop URL REQUESTS CONCURRENCY INPUT_LEN OUTPUT_LEN [chat]".into());
    };
    let mut options = LoadOptions::new(url);
    options.amount = Amount::Requests(requests.parse()?);
    options.load.concurrency = Some(concurrency.parse()?);
    options.input_len = Length::fixed(input_len.parse()?);
    options.output_len = Length::fixed(output_len.parse()?);
    options.ignore_eos = true;
    if rest == ["chat"] {
        options.endpoint = Endpoint::Chat;
    }
    let report = run(&options)?;
    println!("{report}");
    let mut json = report.to_json();
    if let Some(fields) = json.as_object_mut() {
        fields.remove("requests");
    }
    println!("{json}");
    Ok(())
}
