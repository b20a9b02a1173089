//! The page of `ridge serve`, through its port.

use crate::common::repository;
use crate::common::server::Server;

#[test]
fn the_page_and_its_files_come_whole_and_under_a_strict_policy() {
    let server = Server::start_with(&[], &[("RIDGE_API_KEY", "secret")]);
    let folder = repository().join("crates/ridge-serve/page");
    let mut files = 0;
    for file in folder.read_dir().unwrap() {
        let file = file.unwrap();
        let name = file.file_name().into_string().unwrap();
        let path = if name == "index.html" { "/".to_owned() } else { format!("/page/{name}") };
        // Browsers have no key yet when they ask for the page.
        let answer = server.get(&path);
        assert_eq!(answer.status, 200, "{path}");
        let kind = match name.rsplit('.').next().unwrap() {
            "html" => "text/html; charset=utf-8",
            "js" => "text/javascript; charset=utf-8",
            "css" => "text/css; charset=utf-8",
            _ => "image/svg+xml",
        };
        assert_eq!(answer.header("content-type"), Some(kind));
        assert_eq!(answer.header("x-content-type-options"), Some("nosniff"));
        assert_eq!(answer.body, std::fs::read(file.path()).unwrap(), "{path}");
        assert_eq!(answer.header("content-length"), Some(answer.body.len().to_string().as_str()));
        let policy = answer.header("content-security-policy").unwrap();
        assert!(policy.starts_with("default-src 'none'; script-src 'self';"), "{policy}");
        assert!(!policy.contains("unsafe") && policy.contains("frame-ancestors 'none'"), "{policy}");
        files += 1;
    }
    assert_eq!(files, 12);
}

#[test]
fn the_modules_of_the_page_pass_their_own_tests() {
    let tests = repository().join("crates/ridge-serve/tests/page.test.mjs");
    let node = std::process::Command::new("node").arg("--test").arg(tests).output();
    let Ok(node) = node else { ridge_testing::skip!("node is not installed") };
    let said = String::from_utf8_lossy(&node.stdout).into_owned();
    if !node.status.success() && String::from_utf8_lossy(&node.stderr).contains("bad option") {
        ridge_testing::skip!("this node has no test runner");
    }
    assert!(node.status.success(), "{said}");
}

#[test]
fn the_page_asks_for_nothing_elsewhere_and_inserts_no_markup() {
    let folder = repository().join("crates/ridge-serve/page");
    for file in folder.read_dir().unwrap() {
        let path = file.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        let elsewhere = text.replace("http://www.w3.org/2000/svg", "");
        assert!(!elsewhere.contains("http:") && !elsewhere.contains("https:"), "{path:?}");
        for markup in
            ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", " style=", " onclick="]
        {
            assert!(!text.contains(markup), "{path:?}: {markup}");
        }
        // What is imported and linked is there.
        for part in text.split(['"']).filter(|p| p.starts_with("./") || p.starts_with("/page/")) {
            let name = part.trim_start_matches("./").trim_start_matches("/page/");
            assert!(folder.join(name).is_file(), "{path:?}: {part}");
        }
    }
}
