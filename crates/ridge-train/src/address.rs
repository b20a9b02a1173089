//! Addresses of servers, and what of them may be shown.

use std::path::Path;

/// Is it an `http://` or `https://` address, in any capitals (RFC 3986, section 3.1)?
pub(crate) fn is_remote(path: &Path) -> bool {
    let scheme = path.to_str().and_then(|text| text.split_once("://")).map(|(scheme, _)| scheme);
    scheme.is_some_and(|scheme| ["https", "http"].iter().any(|known| scheme.eq_ignore_ascii_case(known)))
}

/// The address of a server with `***` in place of user and password, and without its path, if it has an `@` anywhere: settings
/// and environment are shown, sent and saved, so such an address is refused, and the message has this.
pub(crate) fn masked(address: &str) -> Option<String> {
    let (ahead, host) = address.rsplit_once('@')?;
    let host = host.split(['/', '?', '#']).next().unwrap_or(host);
    let scheme = ahead.split_once("://").map_or("", |(scheme, _)| scheme);
    let is_scheme = !scheme.is_empty() && scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c));
    Some(if is_scheme { format!("{scheme}://***@{host}") } else { format!("***@{host}") })
}

/// A URL without user information, query and fragment, which may hold passwords and signatures. Other texts stay as they are.
pub(crate) fn public(text: &str) -> String {
    let Some((scheme, rest)) = text.split_once("://") else { return text.to_owned() };
    if !is_remote(Path::new(text)) {
        return text.to_owned();
    }
    let rest = rest.split(['?', '#']).next().unwrap_or(rest);
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    format!("{scheme}://{host}{path}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_part_of_a_password_is_shown() {
        for (address, shown) in [
            ("https://user:secret@host:5000/path", "https://***@host:5000"),
            ("https://user:se/cret@host/path", "https://***@host"),
            ("https://user:se?c#ret@host", "https://***@host"),
            ("user:secret@host", "***@host"),
            ("user:sec://ret@host", "***@host"),
            ("https://secret@host/?x=a@b", "https://***@b"),
        ] {
            assert_eq!(masked(address).as_deref(), Some(shown), "{address}");
        }
        assert_eq!(masked("https://host:5000/path"), None);
    }

    #[test]
    fn a_public_address_has_neither_user_nor_query() {
        for (address, shown) in [
            ("https://user:secret@host:1/a@b.jsonl?signature=x", "https://host:1/a@b.jsonl"),
            ("HTTP://host?signature=x/y", "HTTP://host"),
            ("https://host/a#b", "https://host/a"),
            ("data/what?.jsonl", "data/what?.jsonl"),
            ("s3://bucket/a", "s3://bucket/a"),
        ] {
            assert_eq!(public(address), shown);
        }
    }

    #[test]
    fn schemes_have_any_capitals() {
        let remote = |text: &str| is_remote(Path::new(text));
        assert!(remote("HTTPS://host") && remote("http://host"));
        assert!(!remote("file:///a") && !remote("https") && !remote("a/http://b"));
    }
}
