"""`template_table.json`: what Jinja2, as transformers sets it up, renders for every method, filter, test, operator and function that the chat
templates of published models use, and for the rest of Python's string methods and Jinja's filters.

The published templates are those that Xinference, TRL and axolotl ship; that each name in them is in the table is asserted here.
"""

import json
from pathlib import Path

import jinja2
import transformers
from jinja2 import nodes
from transformers.utils.chat_template_utils import _compile_jinja_template

from makers.packages import unpacked

OUT = Path(__file__).resolve().parents[1] / "template_table.json"

MESSAGES = [
    {"role": "system", "content": "Be brief.\n\nUse 'quotes' <b>."},
    {"role": "user", "content": "  Hello there: a, b </think> x é好 \t\n"},
]
PRELUDE = (
    "{%- set s = 'a-b-c' %}{% set e = '' %}{% set w = '  Ab cD\\té \\n' %}{% set u = 'straße ǅ İ ﬁ ١² ½' %}{% set h = '<a href=\"x\">\\'&/</a>' %}"
    "{% set l = [3, 1, 2] %}{% set n = ['b', 'A', 'c', 'a'] %}{% set t = (1, 'x') %}"
    "{% set d = {'b': 1, 'a': [1, 2.5, none, true], 'C': 'é<\"\\'\\\\\\n'} %}"
    "{% set rows = [{'k': 'x', 'v': 2}, {'k': 'y', 'v': 1}, {'k': 'x'}] %}"
    "{% set content = messages[-1].content %}"
)
# Expressions by what they are of; a row that begins with `{` is a whole template.
ROWS = {
    "tojson": """
        d | tojson; d | tojson(indent=2); d | tojson(indent=0); d | tojson(ensure_ascii=True); d | tojson(ensure_ascii=False); d | tojson(True)
        d | tojson(separators=(',', ':')); d | tojson(separators=(', ', ' = '), indent=1); d | tojson(sort_keys=True); d | tojson(False, 4, none, True)
        d | tojson(indent='\\t'); d | tojson(indent=none); d | tojson(indent=-1); d | tojson(indent=4, ensure_ascii=False); d | tojson(separators=none); d | tojson(sort_keys=True, indent=2, ensure_ascii=True)
        '😀\\u2028</' | tojson; '😀é' | tojson(ensure_ascii=True); content | tojson; [] | tojson(indent=2); {} | tojson(indent=2); [[], {}] | tojson(indent=2)
        1e20 | tojson; 0.1 | tojson; 1e-7 | tojson; 100.0 | tojson; none | tojson; true | tojson; (1, 2) | tojson; {1: 2, none: 3, 2.5: 1} | tojson
        '\\x00\\x1f\\x7f' | tojson; missing | tojson; range(3) | list | tojson; 12345678901234567890 | tojson; d | tojson(typo=1); d | tojson(separators=(',',))
        [1, [2, [3]]] | tojson(indent=1, separators=(',', ':')); (1.0 / 3) | tojson; messages | tojson; messages[0] | tojson(indent=4); 'a' | tojson + 'b'
        {'b': {'z': 1, 'y': 2}, 'a': 0} | tojson(sort_keys=True); {2: 'x', 10: 'y', 1: 'z'} | tojson(sort_keys=True); d | tojson | length; d | tojson | upper
        {% set x %}<{{ 'é' }}>{% endset %}{{ x | tojson }}; d.items() | list | tojson; d.keys() | list | tojson""",
    "floats and integers": """
        1e20; 1e16; 123456789012345680.0; 1e15; 9999999999999998.0; 0.0001; 0.00001; 1e-7; 1.5e300; 1e22; 0.1 + 0.2; 2.0; -0.0; 5e-324; 1e20 | string
        [1e20, 1e-5, 0.5]; {'a': 1e20}; 1e20 ~ 'x'; 'x' ~ 0.00001; [1e20, 'a'] | join(' '); '%s' % 1e20; '%s' | format(1e20); '{}'.format(1e20); 1e20 | int; 1e3 | int
        7 / 2; 6 / 2; 7 // 2; -7 // 2; 7.5 // 2; 2 ** 10; 2 ** -1; 7 % 3; -7 % 3; 7 % -3; 7.5 % 2; -7.5 % 2; true + true; 10 / 3; 1_000; 2 ** 0.5; 3 * 1.0; 1 / 3; 1e400
        1.0 == 1; 1 == true; 3 | float; '3.7' | float; 'x' | float; 'x' | int; '12' | int; '0x1f' | int(base=16); 3.99 | int; '3.9' | int; 'x' | int(7); none | int
        2.5 | round; 3.5 | round; 2.567 | round(2); 2.1 | round(0, 'ceil'); 2.9 | round(method='floor'); -2 | abs; 5 | round; 1234.5 | round(-2); 1.005 | round(2)""",
    "percent": """
        '%s has %d' % (messages[0].role, 7); '%s' % 'a'; '%d%%' % 5; '%5.2f|' % 3.14159; '%-5s|' % 'ab'; '%5s|' % 'ab'; '%05d' % 42; '%x %X %o' % (255, 255, 8)
        '%(a)s-%(b)d' % {'a': 'x', 'b': 2}; '%r' % 'a'; '%s' % [1, 'a']; '%s' % none; '%e' % 12345.678; '%g' % 0.00001; '%c' % 'x'; '%+d' % 3; '%.3s|' % 'abcdef'
        s % 1; '%s' % (1,); '%s %s' % t; 'a' ~ '%s' % 'b' ~ 'c'; ('%s' % 'a') | upper; '%s' % s | upper; '%s' % d.b; '%s' % l[0]; '%s%s' % ('a', 'b') + 'c'
        l | length % 2; loop_index | default(5) % 2 == 1; (7 % 3) % 2; 10 % 4 * 2; 10 * 4 % 7; 2 + 7 % 4; -7 % 4; 7 % -4; not 7 % 7; 7 % 4 if true else 1; [7 % 4, 9 % 5]
        {% for m in messages %}{% if loop.index0 % 2 == 0 %}{{ m.role }}{% endif %}{% endfor %}; {% set x = 9 % 4 %}{{ x }}; {{ 5 % 3 }}{% raw %}{{ 5 % 3 }}{% endraw %}{# 5 % 3 #}
        '%s' % (s); '%s' % (s ~ 'x'); '%s' % s.upper(); '%s' % s[0]; '%s' % s.split('-')[1]; '%s' % -1; '%s %s' % ('a', 1 % 1); {'a': 7 % 4}; f(7 % 4) if f is defined else 7 % 4
        '%d' % 3.7; '%s' % true; '%d' % 'x'; '%s %s' % 'a'; '%s' % ('a', 'b'); 7 % 0; 'a' % 1; '%%' % (); '%i' % 5; '%s' % d; '%s' % '%s' % 'x'; 2 ** 3 % 5; 7 % 2 ** 2
        {% if 4 % 2 %}a{%- else %}b{% endif %}; {{ '%s' % '}}' }}; {{ '{%' }}{{ 7 % 4 }}; {% set x = '%}' %}{{ x }}{{ 7%4 }}; 7%4; '%s'%'a'; '%s' %s""",
    "strings, case": """
        w.upper(); w.lower(); w.title(); w.capitalize(); w.swapcase(); w.casefold(); u.upper(); u.lower(); u.title(); u.capitalize(); u.swapcase(); u.casefold()
        "they're bill's".title(); 'x-ray 3d'.title(); e.title(); 'ΑΣ'.lower(); 'ß'.capitalize(); "it's" | title; 'aB cD-eF (gh)' | title; w | upper; w | lower
        u | capitalize; 'HELLO' | capitalize; 'a\\nb c' | title; 'ABC'.islower(); 'abc'.islower(); 'a1'.islower(); '1'.islower(); 'AB1'.isupper(); 'Ab Cd'.istitle(); 'ab'.istitle()""",
    "strings, strip": """
        w.strip(); w.lstrip(); w.rstrip(); s.strip('ac'); s.lstrip('a-'); s.rstrip('-c'); s.strip(none); s.strip(''); '\\x1c\\u2003a\\x85'.strip(); '\\u200ba\\ufeff'.strip(); content.strip('\\n')
        content.strip() | length; s.removeprefix('a-'); s.removeprefix('b'); s.removesuffix('-c'); s.removesuffix('x'); s.removeprefix(''); 'aaa'.removeprefix('a'); w | trim; s | trim('a'); missing | trim
        content.lstrip('\\n').rstrip(); s.strip('a', 'b'); 5 | trim; none | trim""",
    "strings, split": """
        s.split('-'); s.split('-', 1); s.split('-', maxsplit=1); s.split(sep='-'); s.split('-', -1); s.split('-', 0); w.split(); w.split(none, 1); ' a  b '.split(' '); e.split(); e.split('-'); s.split('')
        s.rsplit('-', 1); s.rsplit('-'); s.rsplit(); w.rsplit(none, 1); w.rsplit(maxsplit=1); ' a  b  c '.rsplit(none, 1); s.rsplit('x', 1); content.rsplit('</think>', 1)[-1]; content.split('</think>')[-1].lstrip('\\n'); 'aXXaXX'.split('XX')
        s.partition('-'); s.rpartition('-'); s.partition('x'); s.rpartition('x'); s.partition('-')[2]; s.partition(''); 'a\\nb\\r\\nc\\rd\\x0be\\u2028f'.splitlines(); 'a\\n\\nb\\n'.splitlines(True); 'a\\nb'.splitlines(keepends=true)
        ''.splitlines(); 'a b'.split(' ')[0]; 'a,b'.split(',') | join('+'); s.split('-') | last; s.split('-')[1:]; '-'.join(['x', 'y']); ''.join([]); ', '.join(d); '-'.join([1]); '-'.join('abc'); ' '.split(); '  a b'.split(none, 0); 'a b  '.split(none, 1); s.split(1)""",
    "strings, search": """
        s.find('b'); s.find('x'); s.find('-', 2); s.find('-', 2, 3); s.rfind('-'); s.rfind('-', 0, 3); s.index('b'); s.index('x'); s.rindex('-'); s.rindex('-', 0, 2); s.count('-'); s.count('-', 2); e.count(''); s.count('')
        'aaaa'.count('aa'); s.startswith('a'); s.startswith('b', 2); s.startswith(('x', 'a')); s.startswith(('x',)); s.endswith('c'); s.endswith('b', 0, 3); s.endswith(('x', '-c')); s.startswith(''); 'é好x'.find('x'); 'é好x'.rfind('好'); s.find('', 9); s.find('', 5); s.find('c', -1); s.startswith('a-b-c', -5)
        'b' in s; 'x' not in s; '' in s; 1 in l; 'a' in d; 'x' in t; s.startswith(['a']); s.startswith(1); s.find(1); 'a' in missing; none in d.a; s.count('-', -3, -1); s.endswith('', 5); s.find('b', none); s.index('c', 0, 4)""",
    "strings, replace and align": """
        s.replace('-', '+'); s.replace('-', '+', 1); s.replace('', '.'); s.replace('', '.', 2); s.replace('-', ''); s.replace('-', '+', -1); s.replace('x', 'y'); s | replace('-', '+'); s | replace('-', '+', 1); s | replace('', '.'); 5 | replace('5', '6')
        s.replace('-', '+', count=1); 'a'.center(4) ~ '|'; 'a'.center(5, '*'); 'ab'.center(5, '*'); 'a'.ljust(3) ~ '|'; 'a'.rjust(3, '0'); '42'.zfill(5); '-42'.zfill(5); '+7'.zfill(1); 'abc'.zfill(2); 'a\\tbc\\td'.expandtabs(); 'a\\tb'.expandtabs(4); 'a\\tb\\n\\tc'.expandtabs(tabsize=2); 'a\\tb'.expandtabs(0)
        'a' | center(5) ~ '|'; s | indent; 'a\\nb\\n\\nc' | indent(2); 'a\\nb' | indent(2, true); 'a\\n\\nb' | indent(2, blank=true); 'a\\nb' | indent('> '); 'a' * 3; 3 * 'a'; 'a' * 0; [1] * 2; s[0]; s[-1]; s[1:]; s[:-1]; s[::-1]; s[::2]; s[5:]; s[-2:]; s[1:4:2]; 'é好x'[1]; s[10]; s | reverse; s | first; s | last; e | first; 'ab' < 'b'; 'a' ~ 1 ~ none ~ true ~ 2.0 ~ [1, 'a']; 'a' + 1; '1' + '2'
        'a b'.translate({97: 'x'}); 'a'.encode(); s.format(); '{} {}'.format('a', 1); '{0}{1}{0}'.format('a', 'b'); '{x}'.format(x=1); '{:>5}|{:<5}|{:^5}'.format('a', 'b', 'c'); '{:.2f}'.format(3.14159); '{:,}'.format(1234567); '{{}}'.format(); '{!r}'.format('a'); '{:05d}'.format(42); '{:x}'.format(255); '{a[0]}'.format(a=[1]); '{:%}'.format(0.5); '{:e}'.format(12345.678)
        '%s-%s' | format('a', 1); '%(a)s' | format(a=1); '{x}'.format_map({'x': 1})""",
    "strings, tests": """
        '12'.isdigit(); '²'.isdigit(); '½'.isdigit(); '½'.isnumeric(); '一'.isnumeric(); '١'.isdecimal(); '²'.isdecimal(); '12'.isdecimal(); 'a1'.isalnum(); 'a b'.isalnum(); 'é'.isalpha(); 'a1'.isalpha(); ''.isalpha(); ' \\t\\x1c'.isspace(); ''.isspace(); '\\u200b'.isspace()
        'é'.isascii(); ''.isascii(); 'a_1'.isidentifier(); '1a'.isidentifier(); 'é'.isidentifier(); 'if'.isidentifier(); ''.isidentifier(); 'a b'.isprintable(); 'a\\n'.isprintable(); ''.isprintable(); '一'.isalpha(); '١'.isalnum(); 'ⅷ'.isnumeric(); 'ⅷ'.isalpha(); 'ⅷ'.islower(); 'ª'.islower(); 'ǅ'.istitle(); 'ǅ'.isupper(); '一二'.isdigit(); '५'.isdigit(); '\\xa0'.isprintable()""",
    "lists and dictionaries": """
        d.items() | list; d.keys() | list; d.values() | list; d.get('b'); d.get('x'); d.get('x', 7); d['b']; d.b; d.x; d['x'] is defined; d.a[1]; d | length; l | length; missing | length; e | length; messages[0].tool_calls | length; missing | count; t | length; d.keys() | length; d.items() | length
        d | items | list; missing | items | list; d | dictsort; d | dictsort(true); d | dictsort(false, 'value'); d | dictsort(reverse=true); {'b': 2, 'a': 1} | dictsort(by='value'); l.index(1); l.index(9); l.count(1); l.append(1); l.copy(); d.copy(); d.update({}); d.pop('b'); l + [4]; l | sort; l | sort(reverse=true); n | sort; n | sort(case_sensitive=true); rows | sort(attribute='v')
        rows[:2] | sort(attribute='v'); l | min; l | max; n | min; n | max; [] | min; [] | max is defined; l | sum; rows[:2] | sum(attribute='v'); rows[:2] | sum('v', 10); l | first; l | last; [] | first; [] | last is defined; l | join; l | join('-'); rows | join(', ', attribute='k'); l | reverse | list; n | unique | list; [1, 1, 2] | unique | list; rows | unique(attribute='k') | list; n | unique(true) | list
        l | batch(2) | list; l | batch(2, 'x') | list; l | slice(2) | list; l | list; d | list; s | list; rows | map(attribute='k') | list; rows | map(attribute='v', default=0) | list; n | map('upper') | list; l | map('string') | join; n | map('replace', 'a', 'z') | list; rows | groupby('k') | length; {% for k, g in rows | groupby('k') %}{{ k }}:{{ g | length }} {% endfor %}
        l | select('odd') | list; l | reject('odd') | list; l | select | list; [0, 1, '', 'a'] | select | list; rows | selectattr('v') | list; rows | selectattr('v', 'defined') | list; rows | selectattr('k', 'equalto', 'x') | list; rows | rejectattr('k', 'eq', 'x') | list; rows | selectattr('k', 'in', ['y']) | map(attribute='v') | list; messages | selectattr('role', 'equalto', 'user') | list | length; l | select('gt', 1) | list; l | select('in', [1, 2]) | list; ['a', 'b'] | reject('equalto', 'a') | join(', ')
        d; l; t; (1,); (); {}; []; [none, true, 1.0, 'a\\'b', \"a'b\", 'a\\n']; {'a': {'b': (1, 2)}}; [d.x]; l[1:]; l[::-1]; l[-1]; l[5]; l[0:2]; t[0]; t + (2,); messages[1:] | length; l == [3, 1, 2]; t == (1, 'x'); t == [1, 'x']; {'a': 1} == {'a': 1}; [1, 2] < [1, 3]; range(3) | list; range(1, 7, 2) | list; range(5, 0, -2) | list; dict(a=1, b='x'); dict([('a', 1)]); d.items() | first; {'items': 1}.items() | list; {'get': 1}.get('get'); {'keys': 2}['keys']
        {% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}; {% for k, v in d | items %}{{ k }}{% endfor %}; {% for k in d %}{{ k }}{{ loop.index }}{{ loop.last }}{% endfor %}; {% for x in missing %}{{ x }}{% else %}none{% endfor %}; {% for x in l if x > 1 %}{{ x }}{{ loop.length }}{% endfor %}; {% for a, b in [(1, 2), (3, 4)] %}{{ a + b }}{% endfor %}; {% for x in l %}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.revindex }}{{ loop.cycle('a', 'b') }}{% endfor %}; {% for x in 'ab' %}{{ x }}{% endfor %}; {% for x in range(5) %}{% if x == 1 %}{% continue %}{% endif %}{% if x == 3 %}{% break %}{% endif %}{{ x }}{% endfor %}""",
    "undefined and none": """
        missing; missing ~ 'a'; missing | upper; missing | default('x'); none | default('x'); none | default('x', true); '' | default('x', true); '' | d('x'); missing.a; missing['a']; missing + 'a'; missing == missing; missing == none; missing is none; missing is defined; missing is undefined; d.x.y; not missing; missing or 'a'; missing and 'a'; missing | list; missing | join; missing | first; missing | string; missing | int; missing | tojson; missing()
        missing | replace('a', 'b'); missing | trim | length; missing | lower; missing in ['']; missing | select | list; missing | sort; missing | reverse | list; none; none ~ 'a'; none | string; none | length; none | upper; none + 'a'; none == none; none is none; none | list; [missing]; missing[0]; missing.upper(); messages[0].tool_calls is defined; messages[0]['name']; messages[0].get('name'); missing < 1; missing | abs; missing | map('upper') | list; -missing; missing | last; missing | max; missing | sum; missing | dictsort; missing | unique | list; missing | title; missing | capitalize; missing | float; missing | safe; missing | escape; missing is string; missing is iterable; missing is sequence; missing is mapping; missing is number; missing != 'a'; missing ~ none; {% if missing %}a{% else %}b{% endif %}; {{ missing if missing is defined else 'b' }}; {{ 'a' if false }}; ('a' if false) is defined""",
    "escape": """
        h | escape; h | e; h | safe; h | forceescape; h | escape | length; 5 | escape; h | e | upper; h | string; h; h | escape | escape; (h | e) is string; [h] | join | e; h | urlencode; 'a b&c/é' | urlencode; {'a': 'b c', 'd': 1} | urlencode; '<b>a</b> c' | striptags; h | tojson; {% set x = h | e %}{{ x }}; {% filter upper %}a{{ h }}{% endfilter %}; (h | safe) + '<'; h | e | replace('a', 'b'); h | e | trim""",
    "filters, other": """
        'a b c' | wordcount; 'a b c d e' | truncate(5); 'a b c d e' | truncate(3, true); 'abcdefghijkl' | truncate(6, true, '..', 0); 'a b c d' | wordwrap(3); 1000 | filesizeformat; 3 | pprint; d | attr('b'); t | attr('count') is defined; l | xmlattr; {'a': 1, 'b': none} | xmlattr; 5 | string | length; 2.0 | string; true | string; [1] | string; 'x' | list | length; n | random is string; true | lower; 3 | upper; 'a' | default(none); d | string; t | string; none | lower; 1 | tojson ~ 'a'""",
    "tests": """
        s is string; 1 is string; 1 is number; 1.5 is number; true is number; true is boolean; 1 is boolean; 1 is integer; true is integer; 1.0 is integer; 1.0 is float; 1 is float; none is none; none is iterable; none is sequence; none is mapping; none is number; false is iterable; missing is none; l is sequence; t is sequence; s is sequence; d is sequence; l is iterable; s is iterable; d is iterable; 1 is iterable; d is mapping; l is mapping; messages[0] is mapping; true is true; 1 is true; false is false; 0 is false
        3 is odd; 4 is even; 9 is divisibleby 3; 9 is divisibleby(2); 1 is eq 1; 1 is equalto(1); 1 is ne 2; 1 is lt 2; 2 is gt(1); 1 is le 1; 1 is ge 2; 1 is in [1]; 'a' is in 'abc'; 1 is not in [2]; s is not string; s is lower; 'AB' is upper; missing is callable; range is callable; namespace is callable; s is sameas s; none is sameas none; h is escaped; (h | e) is escaped; 'upper' is filter; 'nothing' is filter; 'odd' is test; range(2) is sequence; range(2) is iterable; d.items() is iterable; d.items() is mapping; (1, 2) is iterable; 1 is not none; 'a' is defined and 'b' is string; s is not defined""",
    "operators": """
        1 + 2 * 3; (1 + 2) * 3; 10 - 2 - 3; 2 ** 3 ** 2; -2 ** 2; 1 < 2 < 3; 1 < 2 > 1; 1 == 1.0; 'a' == 'a'; 1 != 2; not true; true and false; true or false; 1 and 2; 0 or 'x'; '' or none; 1 if true else 2; 'a' if 0 else 'b'; [1] + [2]; 'a' in ['a'] and 1; not 1 in [2]; 1 in (1, 2); 'k' in rows[0]; true; none; True; None; False; 1 ~ 2; -1; +1; - -1; 1 - -1; l[0] + l[-1]; 'a' * 2 + 'b'; 'x' if s else 'y'; (1, 2)[0]; [1, 2][1]; {'a': 1}.a; 'abc'[1:][0]; 1 // 2 + 1; not not 1; true == 1; 5 and 'b' or 'c'; 'é' > 'z'; none is none and 1; 1 in [true]""",
    "functions and statements": """
        {% set ns = namespace(a=1, b='x') %}{% set ns.a = ns.a + 1 %}{{ ns.a }}{{ ns.b }}; {% set ns = namespace() %}{% for x in l %}{% set ns.last = x %}{% endfor %}{{ ns.last }}; {% macro m(a, b=2) %}{{ a }}-{{ b }}{% endmacro %}{{ m(1) }} {{ m(1, b=3) }} {{ m(a=4) }}; {% macro m() %}{{ caller() }}!{% endmacro %}{% call m() %}x{% endcall %}; {% macro m(a) %}{{ a | trim }}{% endmacro %}{{ m(' x ') | upper }}{{ m('y') + 'z' }}{{ m('q') | length }}; {% macro m() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, x=2) }}
        {% set x %} a {{ s }} {% endset %}{{ x | trim }}; {% set a, b = 1, 2 %}{{ a }}{{ b }}; {% set a = b = 1 %}; {% if 1 %}a{% elif 2 %}b{% else %}c{% endif %}; {% with a=1 %}{{ a }}{% endwith %}; {%- set x = 1 -%}  y  {{- x -}}  z; {% raw %}{{ x }}{% endraw %}; {# c #}a{#- d -#} b; {{ raise_exception('no') }}; {% generation %}a{% endgeneration %}b; {% do l.append(1) %}; {% include 'a' %}; {% for x in l recursive %}{{ x }}{% endfor %}; {{ joiner(', ')() }}; {{ cycler('a', 'b').next() }}; {{ lipsum() | length > 0 }}; {{ self }}; {{ strftime_now('%Y') | length }}; {{ 'a' 'b' }}; {{ \"a\\tb\" }}; {{ 'a\\\\n' }}; {{ 'a\\'b' }}; {{ '\\u00e9\\x41' }}
        {% for m in messages %}{{ m['role'] }}{% if not loop.last %}, {% endif %}{% endfor %}; {% for m in messages[::-1] %}{{ loop.index0 }}{{ m.role }}{% endfor %}; {% set index = (messages | length - 1) - 0 %}{{ messages[index].role }}; {% if messages[0]['role'] == 'system' and messages[0].content is string %}{{ messages[0].content }}{% endif %}; {{ bos_token }}{{ add_generation_prompt }}{{ tools is none }}{{ tools }}; {% set x = 1 %}{% if true %}{% set x = 2 %}{% endif %}{{ x }}; {% set x = 1 %}{% for i in l %}{% set x = i %}{% endfor %}{{ x }}; {% macro m(x) %}{% if x > 0 %}{{ x }}{{ m(x - 1) }}{% endif %}{% endmacro %}{{ m(3) }}
        {% filter trim | upper %} a {% endfilter %}; {{ messages | map(attribute='role') | join(',') }}; {{ ns is defined }}; {% set d2 = dict(d, z=1) %}{{ d2.z }}; {{ d.items() | map('first') | list }}; {%+ if true %}a{%+ endif %}; a\\n{% if true %}\\nb\\n{% endif %}\\nc\\n; {{ [1, 2, 3] | map('string') | join('-') }}; {% for x in [] %}{% else %}e{% endfor %}; {{ loop is defined }}; {% set x = namespace(l=[]) %}{% for i in l %}{% set x.l = x.l + [i] %}{% endfor %}{{ x.l }}""",
}


def split(text):
    """The rows of a block: what `; ` or a line's end separates."""
    return [row for line in text.strip().splitlines() for row in line.strip().split("; ") if row]


def template(row):
    row = row.replace("\\\\", "\0").replace("\\n", "\n").replace("\0", "\\\\") if row.startswith(("a\\n",)) else row
    return PRELUDE + (row if row.startswith(("{%", "{{", "{#", "a\n")) else "{{ " + row + " }}")


def published():
    """The texts of published templates."""
    def of_json(value):
        if isinstance(value, dict):
            for name, inner in value.items():
                if name == "chat_template" and isinstance(inner, str):
                    yield inner
                else:
                    yield from of_json(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from of_json(inner)

    texts = {path.read_text() for package in [("trl", "1.16.0"), ("axolotl", "0.19.0")] for path in unpacked(*package).rglob("*.jinja")}
    for path in unpacked("xinference", "4.1.0", (".json",)).rglob("*.json"):
        texts.update(of_json(json.loads(path.read_text())))
    return sorted(texts)


def names(text):
    """What a template uses: kinds and names of filters, tests, methods and functions, and the names of their arguments."""
    ast = _compile_jinja_template(text).environment.parse(text)
    macros = {node.name for node in ast.find_all(nodes.Macro)} | {"caller"}
    for node in ast.find_all((nodes.Filter, nodes.Test, nodes.Call)):
        kind, name = type(node).__name__, getattr(node, "name", None)
        if isinstance(node, nodes.Call):
            kind, name = ("method", node.node.attr) if isinstance(node.node, nodes.Getattr) else ("function", getattr(node.node, "name", None))
        if name not in macros:
            yield kind, name, tuple(sorted(keyword.key for keyword in node.kwargs)) if kind in ("Filter", "method") else ()


def main():
    cases, used = [], set()
    for group, text in ROWS.items():
        for row in split(text):
            case = {"group": group, "template": template(row)[len(PRELUDE):]}
            try:
                used.update(names(template(row)))
                rendered = _compile_jinja_template(template(row)).render(
                    messages=MESSAGES, tools=None, documents=None, add_generation_prompt=True, bos_token="<s>")
                case["rendered"] = rendered
            except Exception as error:
                case["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
            cases.append(case)
    texts = published()
    missing = {name for text in texts for name in names(text)} - used
    assert not missing, f"published templates use what is not in the table: {sorted(map(str, missing))}"
    lines = ",\n".join("    " + json.dumps(case, ensure_ascii=False) for case in cases)
    head = {"jinja2": jinja2.__version__, "transformers": transformers.__version__, "messages": MESSAGES, "prelude": PRELUDE}
    fields = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in head.items())
    OUT.write_text(f'{{\n{fields},\n  "cases": [\n{lines}\n  ]\n}}\n')
    errors = sum("error" in case for case in cases)
    print(f"{OUT.name}: {len(cases)} cases, {errors} of them errors; all that {len(texts)} published templates use")


if __name__ == "__main__":
    main()
