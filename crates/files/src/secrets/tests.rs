use super::*;
use serde_json::json;

#[test]
fn redaction_hides_all_secrets_and_nothing_else() {
    let mut config = json!({
        "wandb": { "api_key": "k1", "mode": null }, "token": "t", "pad_token": "<pad>", "max_tokens": 3,
        "dir": "https://me:pw@example.org/a@b", "plain": "https://example.org/a@b", "prompt": "why? see http://a b",
        "hf_token": null,
        "programs": { "p": {
            "command": ["python3", "-m", "my.judge", "judge.py", "mine.py:score,length", "judge.py:12 S3CR3T", "-v", "--api-key", "S3CR3T", "--token=S3CR3T", "-pS3CR3T", "--host=${HOST}"],
            "env": { "A": "S3CR3T", "B": "${B}", "C": "" },
        } },
        "http": { "j": {
            "url": "http://127.0.0.1:8000/score?key=S3CR3T#S3CR3T",
            "headers": { "Authorization": "Bearer S3CR3T", "X-Key": "${KEY}", "Y": "Bearer ${KEY}", "Z": "S3CR3T-${KEY}" },
        } },
    });
    let secrets = redact(&mut config);
    let expected = json!({
        "wandb": { "api_key": HIDDEN, "mode": null }, "token": HIDDEN, "pad_token": "<pad>", "max_tokens": 3,
        "dir": "https://(hidden)@example.org/a@b", "plain": "https://example.org/a@b", "prompt": "why? see http://a b",
        "hf_token": null,
        "programs": { "p": {
            "command": ["python3", "-m", "my.judge", "judge.py", "mine.py:score,length", HIDDEN, "-v", "--api-key", HIDDEN, "--token=(hidden)", HIDDEN, "--host=${HOST}"],
            "env": { "A": HIDDEN, "B": "${B}", "C": "" },
        } },
        "http": { "j": {
            "url": "http://127.0.0.1:8000/score?(hidden)",
            "headers": { "Authorization": HIDDEN, "X-Key": "${KEY}", "Y": "Bearer ${KEY}", "Z": HIDDEN },
        } },
    });
    assert_eq!(config, expected);
    assert_eq!(secrets.hide("is S3CR3T here"), "is (hidden) here");
    // Redacting again changes nothing.
    redact(&mut config);
    assert_eq!(config, expected);
}

#[test]
fn secrets_of_wrong_types_are_hidden() {
    let mut config = json!({ "headers": "S3CR3T", "env": ["S3CR3T", 12345678], "command": "judge.py --key S3CR3T",
        "a": { "command": ["sh -c S3CR3T", 7] }, "b": { "url": ["http://u:S3CR3T@h"] } });
    redact(&mut config);
    assert!(!config.to_string().contains("S3CR3T") && !config.to_string().contains('7'), "{config}");
    assert!(config.to_string().contains("judge.py (hidden)"), "{config}");
}

#[test]
fn redacted_urls_keep_host_and_path() {
    for (url, expected) in [
        ("http://host:80/path", "http://host:80/path"),
        ("http://[::1]/path", "http://[::1]/path"),
        ("u:pw@host/ok?k=v", "(hidden)@host/ok?(hidden)"),
        ("http://u:p@w@host/a@b", "http://(hidden)@host/a@b"),
        ("http://u:pa/ss@host/", "http://(hidden)"),
        ("http://u:pa?ss@host/", "http://(hidden)"),
        ("http://u:${PW}@host:${PORT}/?k=${KEY}", "http://u:${PW}@host:${PORT}/?k=${KEY}"),
        ("http://host/#token", "http://host/#(hidden)"),
        ("http://host/?", "http://host/?"),
        ("", ""),
    ] {
        assert_eq!(redact_url(url), expected, "{url}");
    }
}

#[test]
fn secrets_are_hidden_in_quoted_forms() {
    let config = json!({ "url": "http://user:pass%77ord@h/?key=query-secret",
        "headers": { "A": "Bearer token-12345", "B": "say \"what\" now" }, "env": { "SHORT": "1" } });
    let secrets = Secrets::of(&config);
    let text = "Basic dXNlcjpwYXNzd29yZA== or password, query-secret, token-12345, \"say \\\"what\\\" now\", 1 time";
    assert_eq!(secrets.hide(text), "Basic (hidden) or (hidden), (hidden), (hidden), \"(hidden)\", 1 time");
}

#[test]
fn environment_references_are_expanded_escaped_or_refused() {
    let mut secrets = Secrets::default();
    let home = std::env::var("PATH").unwrap();
    assert_eq!(secrets.expand("a ${PATH} $b ${c#d} $${PATH} $").unwrap(), format!("a {home} $b ${{c#d}} ${{PATH}} $"));
    assert_eq!(secrets.hide(&format!("<{home}>")), "<(hidden)>");
    assert_eq!(secrets.expand("${GRPO_NO_SUCH}"), Err(ExpandError::Missing("GRPO_NO_SUCH".into())));
    assert_eq!(secrets.expand("http://(hidden)@h"), Err(ExpandError::Hidden));
    let text = ExpandError::Missing("A".into()).to_string();
    assert_eq!(text, "the environment has no variable A (`$${A}` stands for the text `${A}`)");
}
