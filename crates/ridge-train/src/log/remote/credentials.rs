//! On whose behalf servers are asked, and other settings that their own clients read from the environment.

use std::path::PathBuf;

use ridge_hub::Credentials;

/// Variables by name, without those that are blank.
pub(in crate::log) struct Environment<'a>(pub(in crate::log) &'a dyn Fn(&str) -> Option<String>);

impl Environment<'_> {
    /// The environment of this process.
    pub(in crate::log) const PROCESS: Environment<'static> = Environment(&|name| std::env::var(name).ok());

    pub(super) fn get(&self, name: &str) -> Option<String> {
        (self.0)(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
    }

    /// Of an MLflow server: a user with a password, or a token.
    pub(super) fn mlflow(&self) -> Credentials {
        let user = self.get("MLFLOW_TRACKING_USERNAME").zip(self.get("MLFLOW_TRACKING_PASSWORD"));
        match (user, self.get("MLFLOW_TRACKING_TOKEN")) {
            (Some((user, password)), _) => Credentials::Basic { user, password },
            (None, Some(token)) => Credentials::Bearer(token),
            (None, None) => Credentials::None,
        }
    }

    /// The key of W&B for `host`: of the environment, or the password of the host in the netrc file.
    pub(super) fn wandb_key(&self, host: &str) -> Option<String> {
        self.get("WANDB_API_KEY").or_else(|| {
            let home = || Some(PathBuf::from(self.get("HOME")?).join(".netrc"));
            let file = self.get("NETRC").map(PathBuf::from).or_else(home)?;
            password(&std::fs::read_to_string(file).ok()?, host)
        })
    }
}

/// The password of `host` in the text of a netrc file (GNU inetutils manual, "The .netrc file").
fn password(text: &str, host: &str) -> Option<String> {
    // A macro ends at an empty line and is no part of any host.
    let mut in_macro = false;
    let lines = text.lines().filter(|line| {
        in_macro = (in_macro || line.trim_start().starts_with("macdef ")) && !line.trim().is_empty();
        !in_macro && !line.trim_start().starts_with('#')
    });
    let mut words = lines.flat_map(str::split_whitespace);
    let mut is_host = false;
    while let Some(word) = words.next() {
        match word {
            "machine" => is_host = words.next() == Some(host),
            "default" => is_host = true,
            "password" if is_host => return words.next().map(str::to_owned),
            "login" | "account" | "password" => {
                words.next();
            }
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const NETRC: &str = "# machine a password commented\nmachine a login user password machine\nmachine b\n  login user\n  \
                         password second\nmacdef init\npassword of-a-macro\n\nmachine c login password password third\n";

    #[test]
    fn the_password_of_a_netrc_file_is_that_of_the_host() {
        assert_eq!(password(NETRC, "a").as_deref(), Some("machine"));
        assert_eq!(password(NETRC, "b").as_deref(), Some("second"));
        assert_eq!(password(NETRC, "c").as_deref(), Some("third"));
        assert_eq!(password(NETRC, "d"), None);
        assert_eq!(password(&format!("{NETRC}default login x password last"), "d").as_deref(), Some("last"));
        assert_eq!(password("machine a login", "a"), None);
    }

    #[test]
    fn the_key_is_of_the_environment_or_of_the_file() {
        let dir = tempfile::tempdir().expect("is made");
        let file = dir.path().join("netrc");
        std::fs::write(&file, NETRC).expect("writes");
        let with = |key: Option<&'static str>| {
            let file = file.display().to_string();
            move |name: &str| match name {
                "WANDB_API_KEY" => key.map(str::to_owned),
                "NETRC" => Some(file.clone()),
                _ => None,
            }
        };
        assert_eq!(Environment(&with(Some("k"))).wandb_key("b").as_deref(), Some("k"));
        assert_eq!(Environment(&with(Some(" "))).wandb_key("b").as_deref(), Some("second"));
        assert_eq!(Environment(&with(None)).wandb_key("x"), None);
    }
}
