//! Extraction of the paths that a stream of tokens names.

use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// Attributes that change neither the behaviour of code nor the machine code.
const WITHOUT_EFFECT: [&str; 3] = ["allow", "doc", "expect"];

/// The condition of an item that only CubeCL needs. Kernels are compiled only where it is true, so
/// it changes their machine code no more than the attributes above.
const WITH_KERNELS: &str = "cfg (feature = \"cubecl-runtime\")";

/// Returns the tokens without documentation and lints, and without the condition [`WITH_KERNELS`].
pub fn without_docs(tokens: TokenStream) -> TokenStream {
    let mut kept: Vec<TokenTree> = Vec::new();
    for token in tokens {
        match token {
            TokenTree::Group(group)
                if group.delimiter() == Delimiter::Bracket
                    && is_without_effect(&group.stream())
                    && ends_in_hash(&kept) =>
            {
                while matches!(kept.last(), Some(TokenTree::Punct(punct)) if ['#', '!'].contains(&punct.as_char()))
                {
                    kept.pop();
                }
            }
            TokenTree::Group(group) => {
                let mut inner =
                    proc_macro2::Group::new(group.delimiter(), without_docs(group.stream()));
                inner.set_span(group.span());
                kept.push(TokenTree::Group(inner));
            }
            other => kept.push(other),
        }
    }
    kept.into_iter().collect()
}

fn is_without_effect(attribute: &TokenStream) -> bool {
    let is_lint_or_doc = matches!(attribute.clone().into_iter().next(), Some(TokenTree::Ident(name)) if WITHOUT_EFFECT.iter().any(|other| name == other));
    is_lint_or_doc || attribute.to_string() == WITH_KERNELS
}

/// Returns true if the tokens end in the `#` or `#!` of an attribute.
fn ends_in_hash(tokens: &[TokenTree]) -> bool {
    let is = |token: Option<&TokenTree>, sign| matches!(token, Some(TokenTree::Punct(punct)) if punct.as_char() == sign);
    let [.., before, _] = tokens else {
        return is(tokens.last(), '#');
    };
    is(tokens.last(), '#') || is(tokens.last(), '!') && is(Some(before), '#')
}

/// Returns every path of one name or more in the tokens, including paths inside groups. `a::{b, c}`
/// gives `a::b` and `a::c`. Names after a dot are excluded, because they are methods and fields.
pub fn paths(tokens: TokenStream) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    collect(tokens, &[], &mut found);
    found.sort_unstable();
    found.dedup();
    found
}

fn collect(tokens: TokenStream, prefix: &[String], found: &mut Vec<Vec<String>>) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let is_punct = |at: usize, sign: char| matches!(tokens.get(at), Some(TokenTree::Punct(punct)) if punct.as_char() == sign);
    let mut at = 0;
    while at < tokens.len() {
        match &tokens[at] {
            TokenTree::Ident(name) => {
                let is_member =
                    at > 0 && is_punct(at - 1, '.') && !(at > 1 && is_punct(at - 2, '.'));
                let mut path = prefix.to_vec();
                path.push(plain(name));
                at += 1;
                while is_punct(at, ':') && is_punct(at + 1, ':') {
                    match tokens.get(at + 2) {
                        Some(TokenTree::Ident(name)) => {
                            path.push(plain(name));
                            at += 3;
                        }
                        Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace => {
                            collect(group.stream(), &path, found);
                            at += 3;
                        }
                        // `::<` and `::*`
                        _ => at += 2,
                    }
                }
                if !is_member {
                    found.push(path);
                }
            }
            TokenTree::Group(group) => {
                collect(group.stream(), &[], found);
                at += 1;
            }
            _ => at += 1,
        }
    }
}

/// Returns a name without `r#`.
pub fn plain(name: &proc_macro2::Ident) -> String {
    let name = name.to_string();
    name.strip_prefix("r#").map(str::to_owned).unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> TokenStream {
        text.parse()
            .unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn paths_are_found_in_groups_and_trees() {
        let found = paths(parsed(
            "fn f() { use a::{b, c::d}; x.method(e::g::<H>()); 0..n }",
        ));
        let found: Vec<String> = found.iter().map(|path| path.join("::")).collect();
        for path in ["a::b", "a::c::d", "e::g", "H", "n", "x"] {
            assert!(
                found.iter().any(|other| other == path),
                "{path} is not in {found:?}"
            );
        }
        assert!(!found.iter().any(|path| path == "method"), "{found:?}");
    }

    #[test]
    fn documentation_lints_and_the_feature_of_kernels_are_no_tokens() {
        let with = parsed(
            "#![allow(x)] /// Doc.\n #[inline] #[cfg(feature = \"cubecl-runtime\")] fn f() { #[expect(clippy::y)] /* why */ let a = [1, 2]; }",
        );
        assert_eq!(
            without_docs(with).to_string(),
            parsed("#[inline] fn f() { let a = [1, 2]; }").to_string()
        );
        let other = parsed("#[cfg(feature = \"inspect\")] fn f() {}");
        assert_eq!(without_docs(other.clone()).to_string(), other.to_string());
    }
}
