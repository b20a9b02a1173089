//! Specification sheets, detection, topology and roofline of the machines that Ridge runs on.
