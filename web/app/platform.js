/** What this browser is, where the model runs, and how to get WebGPU here. */

/** @typedef {import('./types.js').Adapter} Adapter */
/** @typedef {import('./types.js').Support} Support */

/** @param {Adapter|null|undefined} adapter @returns {string} as short as it says something, or '' */
export function adapterName(adapter) {
  if (!adapter) return '';
  const { description, device, vendor, architecture } = adapter;
  return description || device || [vendor, architecture].filter(Boolean).join(' ');
}

/**
 * @param {Adapter|null|undefined} adapter
 * @returns {string} "on this machine’s GPU (…)"
 */
export function whereItRuns(adapter) {
  const name = adapterName(adapter);
  if (adapter?.software) return 'on this machine’s processor, without a GPU, which is slow';
  return name ? `on this machine’s GPU (${name})` : 'on this machine’s GPU';
}

/** Browsers that have WebGPU without any switch, as of April 2026 (the GPU for the Web group's status page). */
export const BROWSERS = [
  ['Chrome, Edge', 'from 113 on Windows, macOS and ChromeOS; from 121 on Android 12 or later; on Linux from 144 with '
    + 'Intel graphics (Gen12 or later) and from 147 with NVIDIA'],
  ['Safari', 'from 26 on macOS, iPhone and iPad'],
  ['Firefox', 'from 141 on Windows; from 145 on Macs with Apple silicon (macOS 26; from 147 on older ones)'],
];

/**
 * What a person can do in this browser.
 * @param {string} code why WebGPU cannot be used: 'webgpu-missing' or 'adapter-missing'
 * @param {string} agent the user agent string
 * @param {boolean} secure whether the page is a secure context
 * @returns {{text: string, code?: string}[]} steps; `code` is something to type or paste
 */
export function howToGetWebGpu(code, agent, secure) {
  if (!secure) {
    return [{ text: 'This page came over plain http from another machine, and browsers offer WebGPU only to https and '
      + 'to localhost. Open it over https, or on the machine that serves it, or through a tunnel such as',
    code: 'ssh -L 8000:localhost:8000 that-machine' }];
  }
  const linux = /Linux/.test(agent) && !/Android/.test(agent);
  if (/Firefox\//.test(agent)) {
    return [
      { text: 'Update Firefox. Where WebGPU is not on by itself (Linux, Android, Macs with Intel), open this page '
        + 'in a new tab and set dom.webgpu.enabled to true:', code: 'about:config' },
      { text: 'Then restart Firefox.' },
    ];
  }
  if (/Chrome\//.test(agent)) {
    /** @type {{text: string, code?: string}[]} */
    const steps = [{ text: 'Update the browser. In its settings, under System, switch on “Use graphics acceleration '
      + 'when available”.' }];
    if (linux) {
      steps.push({ text: 'On Linux with other graphics than those below, start the browser with',
        code: '--enable-unsafe-webgpu --ozone-platform=x11 --use-angle=vulkan '
          + '--enable-features=Vulkan,VulkanFromANGLE' });
    } else {
      steps.push({ text: 'If it is still missing, open this page in a new tab and enable the flag:',
        code: 'chrome://flags/#enable-unsafe-webgpu' });
    }
    steps.push({ text: code === 'adapter-missing' ? 'Update the graphics driver, then restart the browser.'
      : 'Then restart the browser.' });
    return steps;
  }
  if (/Safari\//.test(agent)) {
    return [{ text: 'Update to Safari 26, which comes with macOS 26, iOS 26 and iPadOS 26. In Safari 18 WebGPU can be '
      + 'switched on in the settings: on a Mac under Feature Flags (once “Show features for web developers” '
      + 'is on), on an iPhone or iPad under Apps, Safari, Advanced, Feature Flags.' }];
  }
  return [{ text: 'Open this page in one of the browsers below.' }];
}
