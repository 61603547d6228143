use super::*;

fn hub(variables: &[(&str, &str)]) -> Hub {
    Hub::from_variables(|name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.to_string()))
}

#[test]
fn the_environment_is_read_as_huggingface_hub_does() {
    let home = tempfile::tempdir().unwrap();
    let home_path = home.path().to_str().unwrap();
    std::fs::write(home.path().join("token"), "hf_of_login\n").unwrap();
    let of_home = hub(&[("HF_HOME", home_path)]);
    assert_eq!(of_home.cache, home.path().join("hub"));
    assert_eq!((of_home.token.as_deref(), of_home.offline), (Some("hf_of_login"), false));
    assert_eq!(of_home.token_source, Some(TokenSource::File(home.path().join("token"))));
    assert_eq!(of_home.endpoint, "https://huggingface.co");
    assert!(!format!("{of_home:?}").contains("hf_of_login"), "a token is not for logs");
    let all = hub(&[
        ("HF_HOME", home_path),
        ("HF_HUB_CACHE", "/elsewhere"),
        ("HF_TOKEN", "hf_of_environment"),
        ("HF_HUB_OFFLINE", "yes"),
        ("HF_ENDPOINT", "http://mirror:8080/"),
    ]);
    assert_eq!((all.cache.as_path(), all.token.as_deref()), (Path::new("/elsewhere"), Some("hf_of_environment")));
    assert_eq!(all.token_source, Some(TokenSource::Variable("HF_TOKEN")));
    assert_eq!((all.offline, all.endpoint.as_str()), (true, "http://mirror:8080"));
    let older = hub(&[("HF_HOME", "/nowhere"), ("HUGGING_FACE_HUB_TOKEN", "hf_of_old")]);
    assert_eq!(older.token_source, Some(TokenSource::Variable("HUGGING_FACE_HUB_TOKEN")));
    let none = hub(&[("HF_HOME", "/nowhere"), ("HF_TOKEN", " ")]);
    assert_eq!((none.token, none.token_source), (None, None));
    assert!(!hub(&[("HF_HUB_OFFLINE", "0")]).offline);
    assert_eq!((all.etag_timeout, all.download_timeout), (Duration::from_secs(10), Duration::from_secs(10)));
    let timeouts = hub(&[("HF_HUB_ETAG_TIMEOUT", "3"), ("HF_HUB_DOWNLOAD_TIMEOUT", "0.5")]);
    assert_eq!(
        (timeouts.etag_timeout, timeouts.download_timeout),
        (Duration::from_secs(3), Duration::from_millis(500))
    );
    for illegal in ["0", "-1", "soon", "nan", "inf"] {
        assert_eq!(hub(&[("HF_HUB_ETAG_TIMEOUT", illegal)]).etag_timeout, Duration::ZERO, "{illegal}");
    }
    assert_eq!(hub(&[("XDG_CACHE_HOME", "/x"), ("HF_TOKEN_PATH", "/no")]).cache, Path::new("/x/huggingface/hub"));
    if let Some(user) = env::home_dir() {
        assert_eq!(hub(&[]).cache, user.join(".cache/huggingface/hub"));
        assert_eq!(hub(&[("HF_HOME", "~/hf")]).cache, user.join("hf/hub"));
    }
}

#[test]
fn hub_names_are_distinguished_from_paths() {
    for name in ["gpt2", "Qwen/Qwen2.5-0.5B-Instruct", "meta-llama/Llama-3.2-1B", "a/b_c.d"] {
        assert!(is_name(name), "{name}");
    }
    for path in ["", "a/b/c", "./a", "../a", "/a", "a/", "a/..", "a b", "~/model", "a--b"] {
        assert!(!is_name(path), "{path}");
    }
    assert!(
        is_revision("refs/pr/1")
            && is_revision("v1.0")
            && !is_revision("../x")
            && !is_revision("a//b")
            && !is_revision("")
    );
}

fn offline(cache: &Path) -> Hub {
    Hub { cache: cache.into(), offline: true, endpoint: "http://127.0.0.1:1".into(), ..hub(&[("HF_HOME", "/nowhere")]) }
}

/// Returns a cache with a model of one shard and a commit.
fn cache(folder: &Path) -> PathBuf {
    let model = folder.join("models--org--name");
    let snapshot = model.join("snapshots/0123");
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::create_dir_all(model.join("refs")).unwrap();
    std::fs::write(model.join("refs/main"), "0123").unwrap();
    std::fs::write(snapshot.join("config.json"), "{}").unwrap();
    std::fs::write(snapshot.join("model.safetensors"), "").unwrap();
    snapshot
}

#[test]
fn a_model_is_found_in_the_cache() {
    let root = tempfile::tempdir().unwrap();
    let hub = offline(root.path());
    let snapshot = cache(root.path());
    assert_eq!(hub.locate("org/name", None).unwrap(), snapshot);
    assert_eq!(hub.locate("org/name", Some("main")).unwrap(), snapshot);
    assert_eq!(hub.locate("org/name", Some("0123")).unwrap(), snapshot);
    assert_eq!(hub.locate(snapshot.to_str().unwrap(), None).unwrap(), snapshot, "a folder is itself");
    let refused = |model: &str, revision, parts: &[&str]| {
        let text = hub.locate(model, revision).unwrap_err().to_string();
        for part in parts {
            assert!(text.contains(part), "{part:?} is not in: {text}");
        }
    };
    refused("org/name", Some("v2"), &["no revision v2"]);
    refused("org/name", Some("../.."), &["is not a branch"]);
    refused("org/other", None, &["there is no folder org/other", "has no models--org--other"]);
    refused("./no/such", None, &["there is no folder ./no/such", "ORGANISATION/MODEL"]);
    refused(snapshot.to_str().unwrap(), Some("v2"), &["it is a folder here", "v2"]);
    let file = snapshot.join("config.json");
    refused(file.to_str().unwrap(), None, &["it is a file", "a folder with config.json"]);
    std::fs::remove_file(snapshot.join("model.safetensors")).unwrap();
    refused("org/name", None, &["only a part of it", "no model.safetensors"]);
    assert_eq!(hub.locate_config("org/name", None).unwrap(), snapshot, "weights are not needed");
    std::fs::remove_file(file).unwrap();
    let text = hub.locate_config("org/name", None).unwrap_err().to_string();
    assert!(text.contains("only a part of it") && text.contains("no config.json"), "{text}");
}
