//! Python's `strftime` in the C locale.

use std::fmt::Write;

use super::fault::{Res, unsupported};

/// What a template takes for the present: a date and time of day, without a time zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Clock {
    /// The year, 1 to 9999.
    pub year: u16,
    /// The month, 1 to 12.
    pub month: u8,
    /// The day of the month, from 1.
    pub day: u8,
    /// The hour, 0 to 23.
    pub hour: u8,
    /// The minute, 0 to 59.
    pub minute: u8,
    /// The second, 0 to 59.
    pub second: u8,
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

impl Clock {
    /// The date and time `seconds` after the beginning of 1970, in the time zone that the seconds are given in: add
    /// the offset of a time zone to get its local time. Kept within the years 1 to 9999.
    pub fn from_unix(seconds: i64) -> Self {
        let seconds = seconds.clamp(-62_135_596_800, 253_402_300_799);
        let (days, in_day) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
        // Days are counted in years that begin in March, so that the leap day is a year's last; an era is 400 years.
        let since = days + 719_468;
        let era = since.div_euclid(146_097);
        let day_of_era = since.rem_euclid(146_097);
        let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let shifted = (5 * day_of_year + 2) / 153;
        let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
        let year = era * 400 + year_of_era + i64::from(month <= 2);
        Self {
            year: year as u16,
            month: month as u8,
            day: (day_of_year - (153 * shifted + 2) / 5 + 1) as u8,
            hour: (in_day / 3600) as u8,
            minute: (in_day / 60 % 60) as u8,
            second: (in_day % 60) as u8,
        }
    }

    /// The present in UTC, by the clock of the system.
    pub fn now_utc() -> Self {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Self::from_unix(since.map_or(0, |since| since.as_secs() as i64))
    }

    /// The day of the year, from 1.
    fn day_of_year(self) -> u32 {
        let leap = self.year.is_multiple_of(4) && (!self.year.is_multiple_of(100) || self.year.is_multiple_of(400));
        let before = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334];
        let month = usize::from(self.month.clamp(1, 12)) - 1;
        before[month] + u32::from(self.day) + u32::from(leap && self.month > 2)
    }

    /// The day of the week, 0 for Sunday.
    fn weekday(self) -> u32 {
        let years = u32::from(self.year.max(1)) - 1;
        (years + years / 4 - years / 100 + years / 400 + self.day_of_year()) % 7
    }

    /// `datetime.strftime(format)`
    pub(crate) fn strftime(self, format: &str) -> Res<String> {
        let mut out = String::new();
        let mut chars = format.chars();
        while let Some(c) = chars.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let mut code = chars.next();
            // Of the flags of the C library, the one that leaves the padding off.
            let bare = code == Some('-');
            if bare {
                code = chars.next();
            }
            self.code(&mut out, code, bare)?;
        }
        Ok(out)
    }

    fn code(self, out: &mut String, code: Option<char>, bare: bool) -> Res<()> {
        let month = MONTHS[usize::from(self.month.clamp(1, 12)) - 1];
        let day = DAYS[self.weekday() as usize];
        let hour12 = (self.hour + 11) % 12 + 1;
        let (value, width, fill) = match code {
            Some('d') => (u32::from(self.day), 2, '0'),
            Some('e') => (u32::from(self.day), 2, ' '),
            Some('m') => (u32::from(self.month), 2, '0'),
            Some('H') => (u32::from(self.hour), 2, '0'),
            Some('k') => (u32::from(self.hour), 2, ' '),
            Some('I') => (u32::from(hour12), 2, '0'),
            Some('l') => (u32::from(hour12), 2, ' '),
            Some('M') => (u32::from(self.minute), 2, '0'),
            Some('S') => (u32::from(self.second), 2, '0'),
            Some('y') => (u32::from(self.year % 100), 2, '0'),
            Some('j') => (self.day_of_year(), 3, '0'),
            Some('C') if self.year >= 1000 => (u32::from(self.year / 100), 2, '0'),
            Some('w') => (self.weekday(), 1, '0'),
            Some('u') => ((self.weekday() + 6) % 7 + 1, 1, '0'),
            Some('U') => ((self.day_of_year() + 6 - self.weekday()) / 7, 2, '0'),
            Some('W') => ((self.day_of_year() + 6 - (self.weekday() + 6) % 7) / 7, 2, '0'),
            Some(code) if !bare => return self.words(out, code, month, day),
            _ => return unsupported("a format of strftime_now is not supported"),
        };
        // Writing to a string cannot fail.
        let _ = match (bare, fill) {
            (true, _) => write!(out, "{value}"),
            (false, '0') => write!(out, "{value:0width$}"),
            (false, _) => write!(out, "{value:width$}"),
        };
        Ok(())
    }

    fn words(self, out: &mut String, code: char, month: &str, day: &str) -> Res<()> {
        let whole = match code {
            'b' | 'h' => &month[..3],
            'B' => month,
            'a' => &day[..3],
            'A' => day,
            'p' => ["AM", "PM"][usize::from(self.hour >= 12)],
            'P' => ["am", "pm"][usize::from(self.hour >= 12)],
            'f' => "000000",
            // There is no time zone.
            'Z' | 'z' => "",
            '%' => "%",
            'n' => "\n",
            't' => "\t",
            'Y' if self.year >= 1000 => {
                let _ = write!(out, "{}", self.year);
                return Ok(());
            }
            _ => {
                let parts = match code {
                    'F' => "%Y-%m-%d",
                    'T' | 'X' => "%H:%M:%S",
                    'D' | 'x' => "%m/%d/%y",
                    'R' => "%H:%M",
                    'r' => "%I:%M:%S %p",
                    'c' => "%a %b %e %H:%M:%S %Y",
                    _ => return unsupported(format!("'%{code}' in strftime_now is not supported")),
                };
                let text = self.strftime(parts)?;
                out.push_str(&text);
                return Ok(());
            }
        };
        out.push_str(whole);
        Ok(())
    }
}
