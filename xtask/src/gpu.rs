pub fn pack(_: &std::path::Path) -> Result<(), crate::process::Error> { Ok(()) }
