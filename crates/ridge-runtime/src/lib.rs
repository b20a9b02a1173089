//! Backends and compiled programs: the traits every device implements, memory and the compile pipeline.
