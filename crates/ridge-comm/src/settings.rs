//! What a process must know to be a rank of several, and the variables that tell it.

use std::time::Duration;

use crate::error::CommError;

/// How bytes go from rank to rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// Through shared memory: all ranks on one machine.
    SharedMemory,
    /// Through TCP, on one machine or several.
    Tcp,
}

impl Transport {
    /// Its name in settings.
    pub const fn name(self) -> &'static str {
        match self {
            Self::SharedMemory => "shm",
            Self::Tcp => "tcp",
        }
    }

    /// The transport of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::SharedMemory, Self::Tcp].into_iter().find(|t| t.name() == name)
    }
}

/// What a process needs to know to join the others.
#[derive(Clone, Debug)]
pub struct JoinSettings {
    /// Which rank this process is, from 0.
    pub rank: usize,
    /// How many ranks there are.
    pub ranks: usize,
    /// Which of the ranks on its machine it is, from 0.
    pub local: usize,
    /// Where rank 0 listens: `host:port`.
    pub meet: String,
    /// What all ranks were given and no stranger knows.
    pub token: String,
    /// How they communicate.
    pub transport: Transport,
    /// How long ranks wait for each other to come.
    pub wait: Duration,
    /// How long a rank may be in a collective that another has not come to.
    pub patience: Duration,
}

/// Names of the variables that a launcher sets for each rank.
pub mod variables {
    /// Which rank the process is.
    pub const RANK: &str = "RIDGE_RANK";
    /// How many ranks there are.
    pub const RANKS: &str = "RIDGE_RANKS";
    /// Which of the ranks on its machine the process is; 0 where it is not set.
    pub const LOCAL_RANK: &str = "RIDGE_LOCAL_RANK";
    /// Where they meet: the host and port at which rank 0 listens.
    pub const MEET: &str = "RIDGE_MEET";
    /// What all ranks were given and no stranger knows.
    pub const TOKEN: &str = "RIDGE_TOKEN";
    /// `shm` or `tcp`.
    pub const TRANSPORT: &str = "RIDGE_TRANSPORT";
    /// Seconds that a rank may be in a collective that another has not come to.
    pub const PATIENCE: &str = "RIDGE_PATIENCE";
}

impl JoinSettings {
    /// How long ranks wait for each other to come, unless they are told otherwise.
    pub const WAIT: Duration = Duration::from_secs(60);
    /// How long a rank may be in a collective that another has not come to, unless it is told otherwise.
    pub const PATIENCE: Duration = Duration::from_secs(600);

    /// What the environment says; `None` where this process is no rank of several.
    ///
    /// # Errors
    /// When a variable is missing or makes no sense.
    pub fn from_environment() -> Result<Option<Self>, CommError> {
        Self::from_variables(&|name| std::env::var(name).ok())
    }

    fn from_variables(value: &dyn Fn(&str) -> Option<String>) -> Result<Option<Self>, CommError> {
        let Some(rank) = value(variables::RANK) else { return Ok(None) };
        let needed = |name: &'static str| {
            let why = format!("is required if {} is set", variables::RANK);
            value(name).ok_or(CommError::Setting { name, value: String::new(), why })
        };
        let bad = |name: &'static str, value: &str, why: &str| CommError::Setting {
            name,
            value: value.to_owned(),
            why: why.to_owned(),
        };
        let number = |name: &'static str, text: &str| {
            text.parse::<usize>().map_err(|_| bad(name, text, "must be a whole number"))
        };
        let all = needed(variables::RANKS)?;
        let (ranks, number_of) = (number(variables::RANKS, &all)?, number(variables::RANK, &rank)?);
        if number_of >= ranks {
            return Err(bad(variables::RANK, &rank, &format!("must be below the number of ranks, {ranks}")));
        }
        let local = value(variables::LOCAL_RANK).map(|text| number(variables::LOCAL_RANK, &text)).transpose()?;
        let transport = value(variables::TRANSPORT).unwrap_or_else(|| Transport::Tcp.name().to_owned());
        let patience = value(variables::PATIENCE).map(|text| number(variables::PATIENCE, &text)).transpose()?;
        Ok(Some(Self {
            rank: number_of,
            ranks,
            local: local.unwrap_or(0),
            meet: needed(variables::MEET)?,
            token: value(variables::TOKEN).unwrap_or_default(),
            transport: Transport::from_name(&transport)
                .ok_or_else(|| bad(variables::TRANSPORT, &transport, "must be shm or tcp"))?,
            wait: Self::WAIT,
            patience: patience.map_or(Self::PATIENCE, |seconds| Duration::from_secs(seconds as u64)),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_that_make_no_sense_are_named() {
        let read = |set: &[(&str, &str)]| {
            JoinSettings::from_variables(&|name| set.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned()))
        };
        assert!(read(&[(variables::RANKS, "2")]).unwrap().is_none());
        let said = |set: &[(&str, &str)]| read(set).unwrap_err().to_string();
        let rank = (variables::RANK, "1");
        assert_eq!(said(&[rank]), "RIDGE_RANKS = \"\": is required if RIDGE_RANK is set");
        let ranks = (variables::RANKS, "2");
        assert!(said(&[rank, ranks]).starts_with("RIDGE_MEET"));
        assert!(said(&[rank, (variables::RANKS, "x")]).ends_with("must be a whole number"));
        assert!(said(&[rank, (variables::RANKS, "1")]).ends_with("must be below the number of ranks, 1"));
        let meet = (variables::MEET, "localhost:1");
        assert!(said(&[rank, ranks, meet, (variables::TRANSPORT, "ib")]).ends_with("must be shm or tcp"));
        let settings = read(&[rank, ranks, meet]).unwrap().unwrap();
        assert_eq!((settings.rank, settings.ranks, settings.transport), (1, 2, Transport::Tcp));
    }
}
